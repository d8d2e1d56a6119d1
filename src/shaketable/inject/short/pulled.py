"""Noise on what a linear returns while it is trained on a card: struck in place, pulled back by a hook on the product's node.

`Strike` (`taps.py`) does this with an autograd function. Here the launch writes into the output, and the gradient of relative
noise, which is that noise on the gradient, is taken before the product's own node sees it. Not in place: the gradient that
comes may be others' too. And at the product, not at the view behind it: who changes the output in place takes that view out of
the graph. Fixed noise has a gradient that changes nothing, and no hook.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shaketable.faults import gpu
from shaketable.inject.short import keyed
from shaketable.inject.taps import Strike

if TYPE_CHECKING:
    from shaketable.inject.calls import Frame
    from shaketable.inject.short.keyed import Noise
    from shaketable.inject.taps import Tap


class Pulled(keyed.Striker):
    """One tap on the output of one linear."""

    def strike(self, y: Tensor, frame: Frame) -> Tensor | None:
        """The output, struck in place; None, and nothing has happened, where it is for the ordinary way."""
        noise = self.noise()
        if noise is None or type(y) is not Tensor or not keyed.on_card(y) or not self.tap.acts_in(frame.phase):
            return None
        node = keyed.product_node(y) if y.requires_grad else None
        if (node is None and y.requires_grad) or frame.captured is not None or not keyed.undisturbed():
            return None
        launch = noise.launch(y) if y.is_contiguous() else None
        if launch is None:
            return None
        moment = frame.moment + frame.count(self.tap)
        self.fire(noise, launch, y, moment, frame.phase, False, frame.recomputing)
        if node is not None and noise.kind == gpu.RELATIVE:
            node.register_prehook(PullBack(self.tap, noise, moment, frame.phase))
        return y


class PullBack:
    """Pre-hook of the node of a product: the noise of its output on the gradient that comes."""

    __slots__ = ("moment", "noise", "phase", "tap")

    def __init__(self, tap: Tap, noise: Noise, moment: int, phase: str) -> None:
        self.tap, self.noise, self.moment, self.phase = tap, noise, moment, phase

    def __call__(self, came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = came[0]
        if g is None:
            return None
        if type(g) is not Tensor or torch.is_grad_enabled() or keyed.is_capturing() or torch.compiler.is_compiling():
            return (self._as_ever(g),)
        g = g.contiguous()
        launch, result = self.noise.launch(g), torch.empty_like(g)
        if launch is None or result.data_ptr() & 15:
            return (self._as_ever(g),)
        keyed.hit(launch, g.data_ptr(), result.data_ptr(), self.tap.keys[0], self.moment)
        return (result,)

    def _as_ever(self, g: Tensor) -> Tensor:
        """By the autograd function itself: also where gradients of gradients are asked for, which it refuses."""
        blow = keyed.blow_of(self.tap, self.noise, self.moment, self.phase, (False, 0), False)
        pulled: Tensor = Strike.backward(SimpleNamespace(tap=self.tap, blow=blow, saved_tensors=()), g)[0]
        return pulled

"""Sites where a sampling engine carries the residual stream beside the hidden states.

vLLM's decoder layers take and return a pair (hidden, residual) whose sum is what the layer of any other library takes and
returns; its norms take such a pair and return (normed, sum). A fault on the first of the two alone would be on the MLP's output
and not on the layer's. So a fault acts on the sum: a pair (h, r) becomes (fault(h + r), 0). At the input of a norm the stream
stays clean: the norm reads the faulty sum and hands on the clean one. Where no fault acts, the pair passes untouched.

In a compiled graph all of this must be decided at run time, so it is done inside of two custom operators.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.inject import op
from shaketable.inject.modules import ModuleTaps
from shaketable.inject.op import Tap
from shaketable.inject.passes import Frame
from shaketable.sites.engine_modules import is_engine_module

_HIDDEN = ("hidden_states", "x")


def carries_pair(module: nn.Module) -> bool:
    """Whether a module takes hidden states and a residual whose sum is its input."""
    names = _arguments(module) if is_engine_module(module) else []
    return "residual" in names and any(name in names for name in _HIDDEN)


def _arguments(module: nn.Module) -> list[str]:
    """Names of what a module takes; an engine's operators take `*args` and hand them to the forward of their platform."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    native = getattr(type(module), "forward_native", None)
    return list(inspect.signature(native).parameters)[1:] if names == ["args", "kwargs"] and native is not None else names


class PairTaps(ModuleTaps):
    """The taps at one point of a module that carries a pair."""

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook the module; a norm's input needs its output too, to hand on the clean stream."""
        names = _arguments(module)
        self.hidden = next(name for name in _HIDDEN if name in names)
        self.places = {name: names.index(name) for name in (self.hidden, "residual")}
        self.is_norm = not any(module.children())
        self.total: Tensor | None = None
        hands_on = self.point == "input" and self.is_norm
        after = [module.register_forward_hook(self, with_kwargs=True)] if hands_on else []
        return super().install(module) + after

    def _on_input(self, frame: Frame | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        residual = self._argument("residual", args, kwargs)
        if residual is None:
            return super()._on_input(frame, args, kwargs)
        hidden = self._argument(self.hidden, args, kwargs)
        acts = frame is None or any(frame.current.acts_on(tap) for tap in self.taps if "forward" in tap.site.directions)
        self.total = hidden + residual if acts else None
        for tap in self.taps:
            hidden, residual = self._split(hidden, residual, tap, frame)
        changed = {self.hidden: hidden, "residual": residual}
        args = tuple(changed.pop(self._name(i), value) for i, value in enumerate(args))
        return args, kwargs | changed

    def _on_output(self, frame: Frame | None, output: Any) -> Any:
        if not (isinstance(output, tuple) and len(output) > 1 and _alike(output[0], output[1])):
            return output if self.point == "input" else super()._on_output(frame, output)
        if self.point == "input":
            return self._hand_on(output)
        if self.is_norm:
            return super()._on_output(frame, output)
        hidden, residual = output[:2]
        for tap in self.taps:
            hidden, residual = self._split(hidden, residual, tap, frame)
        return (hidden, residual, *output[2:])

    def _hand_on(self, output: tuple[Any, ...]) -> Any:
        """The stream after a norm: the clean sum, if a fault acted on it."""
        total, self.total = self.total, None
        if total is None:
            return output
        stream = output[1]
        if torch.compiler.is_compiling():
            for tap in self.taps:
                packed = op.traces[tap.injection.handle].packed(stream)
                stream = torch.ops.shaketable.take_back(stream, total, packed, tap.handle)
        else:
            stream = total
        return (output[0], stream, *output[2:])

    def _split(self, hidden: Tensor, residual: Tensor, tap: Tap, frame: Frame | None) -> tuple[Tensor, Tensor]:
        """The pair as the tap leaves it."""
        if frame is None:
            tracing = op.traces[tap.injection.handle]
            number, packed = tracing.count(f"{tap.handle}"), tracing.packed(hidden)
            return torch.ops.shaketable.apply_to_sum(hidden, residual, packed, tap.handle, number)  # type: ignore[no-any-return]
        if not frame.current.acts_on(tap) or "forward" not in tap.site.directions:
            return hidden, residual
        return tap.touch(hidden + residual, frame), torch.zeros_like(residual)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self.places[name]
        return args[place] if place < len(args) else kwargs.get(name)

    def _name(self, place: int) -> str:
        return next((name for name, at in self.places.items() if at == place), "")


def _alike(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape


@torch.library.custom_op("shaketable::apply_to_sum", mutates_args=(), tags=op.UNSAFE)
def _apply_to_sum(hidden: Tensor, residual: Tensor, packed: Tensor, tap: int, number: int) -> tuple[Tensor, Tensor]:
    what = op.application(tap, packed, number)
    if what is None or "forward" not in what.tap.site.directions:
        return hidden.clone(), residual.clone()
    return op.apply(hidden + residual, what), torch.zeros_like(residual)


@_apply_to_sum.register_fake
def _(hidden: Tensor, residual: Tensor, packed: Tensor, tap: int, number: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(residual)


@torch.library.custom_op("shaketable::take_back", mutates_args=(), tags=op.UNSAFE)
def _take_back(stream: Tensor, total: Tensor, packed: Tensor, tap: int) -> Tensor:
    return stream.clone() if op.application(tap, packed, 0) is None else total.clone()


@_take_back.register_fake
def _(stream: Tensor, total: Tensor, packed: Tensor, tap: int) -> Tensor:
    return torch.empty_like(stream)

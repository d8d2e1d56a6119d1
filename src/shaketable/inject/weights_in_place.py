"""Faulty weights inside a sampling engine: written into the parameters, and taken out again exactly.

Everywhere else a faulty weight never replaces the real one (`weights.py`). An engine such as vLLM calls kernels on addresses
that it has noted, so here the fault is written into the memory of the weight, once for every change of step, magnitude, phase
or switch. An engine never trains: no gradient and no optimizer sees the weight.

Noise never accumulates: a faulty weight is always made from a clean copy in the memory of the host. New weights come without
notice, so each write leaves a checksum of the bits: where they are not ours any more, the new weights are the clean ones.

A plan and AQN may act on the same weight: it has one clean copy and one list of taps.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shaketable.inject.weights import HeldTap

if TYPE_CHECKING:
    from shaketable.inject.weights import WeightTap

_CHUNK = 1 << 22
"""Words of a checksum at a time: what it needs beside the weight stays small."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class _Weight:
    """One parameter, and the taps of all injections that act on it, in the order in which they came."""

    module: weakref.ref[nn.Module]
    name: str
    taps: list[HeldTap] = field(default_factory=list)
    clean: Tensor | None = None
    """The bits before we wrote; None while the parameter itself is clean."""
    ours: int = 0
    """Checksum of what we wrote."""

    @property
    def parameter(self) -> Tensor:
        module = self.module()
        assert module is not None
        parameter = module._parameters[self.name]
        assert parameter is not None
        return parameter.data

    def put_back(self) -> None:
        """Make the parameter clean; new weights that came from outside are clean as they are."""
        if self.clean is None:
            return
        if checksum(self.parameter) == self.ours:
            self.parameter.copy_(self.clean)
        else:
            for tap in self.taps:
                tap.forget()
        self.clean = None

    def write(self) -> None:
        """Make the parameter, which is clean now, as the taps that act leave it."""
        self.taps = [tap for tap in self.taps if not tap.injection.closed]
        acting = [(tap, phase) for tap in self.taps if _acts(tap, phase := tap.injection.phase_now())]
        if not acting:
            return
        value = self.parameter
        self.clean = value.to("cpu", copy=True)
        for tap, phase in acting:
            value = tap.written(value, phase)
        self.parameter.copy_(value)
        self.ours = checksum(self.parameter)


_known: weakref.WeakKeyDictionary[nn.Module, dict[str, _Weight]] = weakref.WeakKeyDictionary()
"""Every weight that was ever written to."""


class Written:
    """The weights of one model that a plan acts on."""

    def __init__(self, weights: list[tuple[nn.Module, WeightTap]]) -> None:
        self._weights: list[_Weight] = []
        for module, own in weights:
            assert isinstance(own.tap, HeldTap)
            weight = _known.setdefault(module, {}).setdefault(own.name, _Weight(weakref.ref(module), own.name))
            weight.taps.append(own.tap)
            if weight not in self._weights:
                self._weights.append(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Bring every weight into the state that the injections on it are in now."""
        for weight in self._weights:
            weight.put_back()
            weight.write()

    def faulty(self) -> list[_Weight]:
        return [weight for weight in self._weights if weight.clean is not None]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make every weight clean, whatever the injection says."""
        for weight in self._weights:
            weight.put_back()


def _acts(tap: HeldTap, phase: str) -> bool:
    return "forward" in tap.site.directions and tap.injection.acting(phase)[tap.clause]


def checksum(x: Tensor) -> int:
    """A number that another content would not have: the sum of the bits, each word weighted by its place."""
    words = x.contiguous().view(_BITS[x.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), _CHUNK):
        some = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + len(some) + 1, device=x.device) * 0x9E3779B1 | 1
        total += (some * places).sum()
    return int(total)

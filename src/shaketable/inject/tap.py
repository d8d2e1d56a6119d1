"""A tap: one fault at one place of one model, with its keys, its faulty channels and its row in the tables.

It places the operator of `fault_operator.py`: on a tensor (`forward`), or on the gradient that will come back to it
(`gradient`). Whether it does is looked up in the pass, where it was decided; a tap decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shaketable.faults import Draw, FaultBase
from shaketable.faults.rng import key_of, lanes, mix64
from shaketable.inject.fault_operator import Application, Apply, FaultyGradient, apply

if TYPE_CHECKING:
    from shaketable.inject.device.table import DeviceTable
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Frame, Pass
    from shaketable.ledger.spot import Spot


class Tap:
    """One fault at one place of one model."""

    is_held = False
    """Whether its noise is drawn once for many passes."""

    def __init__(self, injection: Injection, clause: int, spot: Spot, name: str, point: str) -> None:
        self.injection = injection
        self.clause = clause
        self.name = name
        self.point = point
        self.index = len(injection.taps)
        self.begin(spot)
        self.straight = self.site.level == "op"
        """Whether a forward fault leaves gradients alone: an operator's backward is an operator of its own."""
        self.transposed = False
        """Whether the tensor is a weight stored as (in, out)."""
        self.handle = -1
        """The number under which compiled graphs know it."""
        self.tables: dict[torch.device, DeviceTable] = {}
        """Where kernels read what it is to do, per GPU."""

    def begin(self, spot: Spot) -> None:
        """Be as before the first fire, under the plan, the seed and the rank that the injection has now."""
        self.spot = spot
        self.site = self.injection.plan.clauses[self.clause].site
        self._lane_key = key_of(*self._place, "lanes")
        self._lanes: dict[tuple[int, torch.device, bool], Tensor] = {}
        self._references: dict[tuple[bool, int], Tensor | None] = {}
        self.make_keys()

    @property
    def _place(self) -> tuple[object, ...]:
        return self.injection.plan.seed, self.clause, self.name, self.point

    def make_keys(self) -> None:
        """The keys of its place in this rank."""
        self.keys = tuple(key_of(*self._place, direction, self.injection.rank) for direction in ("forward", "backward"))

    @property
    def fault(self) -> FaultBase:
        """The fault as it is now: its magnitude can change while the plan is active."""
        return self.injection.faults[self.clause]

    @property
    def reads_tables(self) -> bool:
        """Whether its kernels may read what they are to do from the table of a GPU."""
        return True

    def touch(self, x: Tensor, frame: Frame) -> Tensor:
        """The tensor as this tap leaves it, forward and backward as the clause says."""
        for direction in self.site.directions:
            x = self.forward(x, frame) if direction == "forward" else self.gradient(x, frame)
        return x

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """The faulty tensor."""
        if not frame.current.acts_on(self):
            return x
        what = Application(self, frame.current, False, 0, frame.count(self), frame.recomputing)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return apply(x, what)
        result: Tensor = Apply.apply(x, what)
        return result

    def gradient(self, x: Tensor, frame: Frame, argument: int = 0, number: int | None = None) -> Tensor:
        """`x` itself, whose gradient will be faulty. `number` tells calls in one pass apart.

        Calls are counted whether or not a gradient is wanted: reentrant checkpointing runs the first pass without.
        """
        n = frame.count((self, argument)) if number is None else number
        if not frame.current.acts_on(self) or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        what = Application(self, frame.current, True, argument, n, frame.recomputing)
        result: Tensor = FaultyGradient.apply(x, what)
        return result

    def key(self, current: Pass, backward: bool, use: int) -> int:
        """Keys all randomness of one application."""
        return mix64(self.keys[backward] ^ current.mixed(use))

    def is_fire(self, what: Application) -> bool:
        """Whether an application counts; one that draws what has been drawn before may not."""
        return True

    def compute(self, x: Tensor, what: Application) -> Tensor:
        """The faulty tensor, neither counted nor measured."""
        fault, draw, mask = what.fault, self._draw(x, what), self.mask(x, what.fault)
        y = fault.apply(x.transpose(-1, -2), draw).transpose(-1, -2) if self.transposed else fault.apply(x, draw)
        return y if mask is None else y.where(mask, x)

    def pull_back(self, g: Tensor, x: Tensor | None, what: Application) -> Tensor:
        """The fault's own gradient, given the clean tensor where the fault asks for it. Not a fire."""
        fault, draw, mask = what.fault, self._draw(g, what), self.mask(g, what.fault)
        if self.transposed:
            turned = fault.gradient(g.transpose(-1, -2), None if x is None else x.transpose(-1, -2), draw)
            result = turned.transpose(-1, -2)
        else:
            result = fault.gradient(g, x, draw)
        return result if mask is None else result.where(mask, g)

    def _draw(self, x: Tensor, what: Application) -> Draw:
        way = what.backward, what.argument
        if way not in self._references:
            known = self.injection.references.get(self._reference_name(way))
            taken = what.fault.reference(x)
            self._references[way] = taken if known is None or taken is None else torch.full_like(taken, known)
        return Draw(what.key, self._references[way])

    def references(self) -> list[tuple[str, float]]:
        """The statistics that its fault took at its first use and keeps, by name."""
        return [(self._reference_name(way), float(taken)) for way, taken in self._references.items() if taken is not None]

    def _reference_name(self, way: tuple[bool, int]) -> str:
        return f"{self.clause} {self.name} {self.point} {'backward' if way[0] else 'forward'} {way[1]}"

    def mask(self, x: Tensor, fault: FaultBase) -> Tensor | None:
        """Which channels are faulty: the last dimension of an activation, the output dimension of a weight."""
        if fault.sparsity == 1 or x.dim() == 0:
            return None
        rows = self.point == "weight" and x.dim() > 1 and not self.transposed
        channels = x.shape[-2 if rows else -1]
        key = (channels, x.device, rows)
        if key not in self._lanes:
            mask = lanes(channels, fault.sparsity, self._lane_key).to(x.device)
            self._lanes[key] = mask.unsqueeze(-1) if rows else mask
        return self._lanes[key]

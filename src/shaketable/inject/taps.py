"""A tap: one fault at one place. The only code that changes a tensor, and the only code that writes to the ledger.

Eager mode goes through two autograd functions: `Strike` computes the faulty tensor and has the fault's own gradient;
`Echo` is the identity forward and puts the fault on the gradient that comes back. Their keys are fixed in forward, so
the error of a gradient belongs to the layer and the call that caused it, whatever thread runs backward and whenever.

Compiled mode goes through custom operators (`compiled.py`) that look the tap up at run time: the graph holds nothing but
its number, so magnitude, phase, switch and noise change from call to call without a recompilation.

Rejected: TorchDispatchMode, which sees more, but is thread-local, costs 7 % before anything happens, cannot be traced
by torch.compile, and meets gradients where no one can tell which layer they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shaketable.errors import PlanError
from shaketable.faults import Draw, FaultBase
from shaketable.faults.generator import key_of, lanes, mix64
from shaketable.inject.board import capturing
from shaketable.inject.calls import Frame

if TYPE_CHECKING:
    from shaketable.inject.board import Board, Pass
    from shaketable.inject.injection import Injection
    from shaketable.inject.spots import Spot
    from shaketable.inject.traced.fused import Seat


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Blow:
    """One application of a fault: everything that was decided when it happened."""

    fault: FaultBase
    key: int
    phase: str
    recomputing: bool = False
    way: tuple[bool, int] = (False, 0)
    """Backward or not, and which argument."""
    captured: Pass | None = None
    """The pass of a CUDA graph that it is captured into."""


class Tap:
    """One fault at one place of one model."""

    def __init__(self, injection: Injection, clause: int, spot: Spot, name: str, point: str) -> None:
        self.injection = injection
        self.clause = clause
        self.spot = spot
        self.name = name
        self.point = point
        self.site = injection.plan.clauses[clause].site
        seed, rank = injection.plan.seed, injection.rank
        self.keys = tuple(key_of(seed, clause, name, point, d, rank) for d in ("forward", "backward"))
        self._lane_key = key_of(seed, clause, name, point, "lanes")
        self._lanes: dict[tuple[int, torch.device, bool], Tensor] = {}
        self._references: dict[tuple[bool, int], Tensor | None] = {}
        self.straight = self.site.level == "op"
        """Whether a forward fault leaves gradients alone: an operator's backward is an operator of its own."""
        self.transposed = False
        """Whether the tensor is a weight stored as (in, out)."""
        self.handle = -1
        self.boards: dict[torch.device, Board] = {}
        """Where kernels read what it is to do, per card."""
        self.seat: Seat | None = None
        """Where on the board of a card it is, for compiled graphs."""

    @property
    def fault(self) -> FaultBase:
        """The fault as it is now: its magnitude can change while the plan is active."""
        return self.injection.faults[self.clause]

    @property
    def asks_board(self) -> bool:
        """Whether its kernels may read what they are to do from the board of a card."""
        return True

    @property
    def is_active(self) -> bool:
        """Whether the tap would do anything now, phases aside."""
        injection = self.injection
        return injection.enabled and not self.fault.is_off and (injection.spares is None or not injection.spares())

    def would_act(self, x: Tensor) -> bool:
        """Whether there is anything to do with `x`: what is captured now may be switched on later."""
        return self.is_active or (x.is_cuda and self.injection.enabled and capturing())

    def acts_in(self, phase: str) -> bool:
        """Whether the clause names this phase."""
        return not self.site.phase or phase in self.site.phase

    def touch(self, x: Tensor, frame: Frame) -> Tensor:
        """The tensor as this tap leaves it, forward and backward as the clause says."""
        for direction in self.site.directions:
            x = self.forward(x, frame) if direction == "forward" else self.echo(x, frame)
        return x

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """The faulty tensor."""
        if not self.would_act(x) or not self.acts_in(frame.phase):
            return x
        blow = self._blow(frame, (False, 0), frame.count(self))
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.strike(x, blow)
        result: Tensor = StraightStrike.apply(x, self, blow) if self.straight else Strike.apply(x, self, blow)
        return result

    def echo(self, x: Tensor, frame: Frame, argument: int = 0, number: int | None = None) -> Tensor:
        """`x` itself, whose gradient will be faulty. `number` tells calls in one frame apart.

        Calls are counted whether or not a gradient is wanted: reentrant checkpointing runs the first pass without.
        """
        n = frame.count((self, argument)) if number is None else number
        if not self.is_active or not self.acts_in(frame.phase) or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        result: Tensor = Echo.apply(x, self, self._blow(frame, (True, argument), n))
        return result

    def _blow(self, frame: Frame, way: tuple[bool, int], n: int) -> Blow:
        moment = frame.mixed_at((way[1] << 32) + n)
        return Blow(self.fault, mix64(self.keys[way[0]] ^ moment), frame.phase, frame.recomputing, way, frame.captured)

    def blow_at(self, moment: int, phase: str, way: tuple[bool, int], *, recomputing: bool = False) -> Blow:
        """A blow outside any frame (compiled graphs)."""
        return Blow(self.fault, mix64(self.keys[way[0]] ^ moment), phase, recomputing, way)

    def strike(self, x: Tensor, blow: Blow, *, backward: bool = False) -> Tensor:
        """Apply the fault, count and measure it. No torch function mode sees how: to whoever watches, the device did it."""
        with torch._C.DisableTorchFunction():
            return self._strike(x, blow, backward)

    def _strike(self, x: Tensor, blow: Blow, backward: bool) -> Tensor:
        start = perf_counter()
        if not x.is_floating_point():
            raise PlanError(f"{self.site.label}: {self.name} {self.point} is {x.dtype}; faults act on floating tensors")
        if x.is_cuda:
            if capturing():
                self.injection.fires += 1
                return self.injection.boards.of(self, x).strike(self, x, blow, backward)
            if x.device in self.boards:
                self.boards[x.device].load(self, x)
        fault, draw, mask = blow.fault, self._draw(x, blow), self._mask(x, blow.fault)
        sums = self.spot.backward if backward else self.spot.forward
        if blow.recomputing and not backward:
            y = self._apply(fault, x, draw, mask)
            self.spot.recomputed += 1
        else:
            n = self.spot.count(blow.phase, backward)
            y = self._apply(fault, x, draw, mask)
            if n & (n - 1) == 0 or sums.changed == 0:
                with torch.no_grad(), self.spot.lock:
                    sums.take(fault, x.detach(), y.detach(), mask)
        self.spot.seconds += perf_counter() - start
        self.injection.fires += 1
        return y

    def strike_as_ever(self, x: Tensor, blow: Blow) -> Tensor:
        """The faulty tensor, neither counted nor measured."""
        return self._apply(blow.fault, x, self._draw(x, blow), self._mask(x, blow.fault))

    def mask_of(self, x: Tensor) -> Tensor | None:
        """The faulty channels of a tensor that this tap strikes; None when all are."""
        return self._mask(x, self.fault)

    def pull_back(self, g: Tensor, x: Tensor | None, blow: Blow) -> Tensor:
        """The fault's gradient: what `Strike` does backward. Not a fire."""
        if g.is_cuda and capturing():
            return self.injection.boards.of(self, g).pull_back(self, g, x, blow)
        return self.pull_back_as_ever(g, x, blow)

    def pull_back_as_ever(self, g: Tensor, x: Tensor | None, blow: Blow) -> Tensor:
        """The same, where Python is there to decide."""
        draw, mask = self._draw(g, blow), self._mask(g, blow.fault)
        if self.transposed:
            turned = blow.fault.gradient(g.transpose(-1, -2), None if x is None else x.transpose(-1, -2), draw)
            result = turned.transpose(-1, -2)
        else:
            result = blow.fault.gradient(g, x, draw)
        return result if mask is None else result.where(mask, g)

    def _apply(self, fault: FaultBase, x: Tensor, draw: Draw, mask: Tensor | None) -> Tensor:
        y = fault.apply(x.transpose(-1, -2), draw).transpose(-1, -2) if self.transposed else fault.apply(x, draw)
        return y if mask is None else y.where(mask, x)

    def _draw(self, x: Tensor, blow: Blow) -> Draw:
        if blow.way not in self._references:
            self._references[blow.way] = blow.fault.reference(x)
        return Draw(blow.key, self._references[blow.way])

    def _mask(self, x: Tensor, fault: FaultBase) -> Tensor | None:
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


class Strike(torch.autograd.Function):
    """The faulty tensor, with the fault's own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tap, blow: Blow) -> Tensor:
        ctx.tap, ctx.blow = tap, blow
        if blow.fault.saves_input:
            ctx.save_for_backward(x)
        return tap.strike(x, blow)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        saved = ctx.saved_tensors
        return ctx.tap.pull_back(g, saved[0] if saved else None, ctx.blow), None, None


class StraightStrike(torch.autograd.Function):
    """The faulty tensor, with the gradient of the clean one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tap, blow: Blow) -> Tensor:
        return tap.strike(x, blow)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g, None, None


class Echo(torch.autograd.Function):
    """The tensor itself, with a faulty gradient while the plan is on.

    An operator reads its inputs and gets a view; what a module returns may be overwritten in place and is a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tap, blow: Blow) -> Tensor:
        ctx.tap, ctx.blow = tap, blow
        return x.view_as(x) if tap.straight else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tap.strike(g, ctx.blow, backward=True) if ctx.tap.is_active else g, None, None

"""The operator: the only code that changes a tensor, counts that it did, and measures it.

`apply(x, application)` is what hooks, the operator mode, attention, weights, compiled graphs and captured graphs all place. It
has one gradient formula, `Apply.backward`: the fault's own, or that of the clean tensor for operator sites, whose backward is
an operator of its own. `FaultyGradient` places it on the gradient that comes back. Keys are fixed in forward, so the error of a
gradient belongs to the layer and the call that caused it, whatever thread runs backward and whenever.

| where | implementation |
|---|---|
| any device | `Tap.compute`: the fault in plain torch, the C++ of `native.cpp` or the kernels of `faults/gpu`; Python counts |
| a GPU, faults that one kernel does alone | the kernel reads its row in a table (`device/table.py`), counts and measures |
| captured into a CUDA graph | the same, or the plain formula with a switch; the GPU counts, as Python is not there |
| torch.compile | `compile/custom_ops.py` registers this function; noise on a GPU is lowered so that inductor fuses it |

Rejected: TorchDispatchMode, which sees more, but is thread-local, costs 7 % before anything happens, cannot be traced
by torch.compile, and meets gradients where no one can tell which layer they belong to. Rejected: calling the registered
operator in eager mode too. torch takes 15 microseconds to reach it, which is more than many a module of a small model takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shaketable.errors import PlanError
from shaketable.inject.counters import measure

if TYPE_CHECKING:
    from shaketable.faults import FaultBase
    from shaketable.inject.pass_context import Pass
    from shaketable.inject.tap import Tap


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """One application of a fault: which tap, in which pass, and the how-manieth it is there."""

    tap: Tap
    current: Pass
    backward: bool
    argument: int
    """Of which argument the gradient is; 0 forward."""
    number: int
    """How often the tap was used before in this pass, in this direction and on this argument."""
    recomputing: bool = False

    @property
    def fault(self) -> FaultBase:
        """The fault, as it was when the pass began."""
        return self.current.faults[self.tap.clause]

    @property
    def key(self) -> int:
        """Keys all randomness."""
        return self.tap.key(self.current, self.backward, (self.argument << 32) + self.number)


def apply(x: Tensor, what: Application) -> Tensor:
    """The faulty tensor; counted, and measured when that is due. No torch function mode sees how: the device did it."""
    with torch._C.DisableTorchFunction():
        return _apply(x, what)


def _apply(x: Tensor, what: Application) -> Tensor:
    tap = what.tap
    injection = tap.injection
    if not x.is_floating_point():
        raise PlanError(f"{tap.site.label}: {tap.name} {tap.point} is {x.dtype}; faults act on floating tensors")
    if x.is_cuda and (y := injection.tables.apply(x, what)) is not None:
        injection.fires += 1
        return y
    start, counters = perf_counter(), injection.counters
    y = tap.compute(x, what)
    if what.recomputing and not what.backward:
        counters.count_recomputed(tap)
    elif tap.is_fire(what) and counters.count(tap, what.backward, what.current.phase):
        with torch.no_grad():
            counters.add(tap, what.backward, measure(what.fault, x.detach(), y.detach(), tap.mask(x, what.fault)))
    counters.spend(tap, what.backward, perf_counter() - start)
    injection.fires += 1
    return y


def pull_back(g: Tensor, x: Tensor | None, what: Application) -> Tensor:
    """The gradient with respect to the clean tensor, given that with respect to the faulty one."""
    if what.current.captured:
        return what.tap.injection.tables.pull_back(g, x, what)
    return what.tap.pull_back(g, x, what)


class Apply(torch.autograd.Function):
    """The faulty tensor, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: Application) -> Tensor:
        ctx.what = what
        if what.fault.saves_input and not what.tap.straight:
            ctx.save_for_backward(x)
        return apply(x, what)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g if ctx.what.tap.straight else _pulled_back(ctx, g), None


@once_differentiable
def _pulled_back(ctx: Any, g: Tensor) -> Tensor:
    saved = ctx.saved_tensors
    return pull_back(g, saved[0] if saved else None, ctx.what)


class FaultyGradient(torch.autograd.Function):
    """The tensor itself, with a faulty gradient while the plan is on.

    An operator reads its inputs and gets a view; what a module returns may be overwritten in place and is a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: Application) -> Tensor:
        ctx.what = what
        return x.view_as(x) if what.tap.straight else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        what: Application = ctx.what
        return apply(g, what) if what.current.acts_on(what.tap) else g, None

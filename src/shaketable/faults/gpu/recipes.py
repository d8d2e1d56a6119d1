"""Faults that one kernel does as a whole, so that they can be captured into a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shaketable.faults.gpu import dispatch

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.base import FaultBase
    from shaketable.faults.gpu.dispatch import TableRow

_NOISES = {"relative_gaussian": True, "absolute_gaussian": False}
_SHIFTS = {"gain": dispatch.GAIN, "systematic_bias": dispatch.SYSTEMATIC}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kernel does a fault."""

    is_noise: bool
    kind: int
    scale: float
    """The one number that a changed magnitude changes."""

    def apply(self, x: Tensor, live: TableRow) -> Tensor | None:
        """The faulty tensor, with everything that may change read from the GPU's memory."""
        if self.is_noise:
            relative = self.kind == dispatch.RELATIVE
            return dispatch.noise(x, 0.0, 0, relative=relative, live=live)
        return dispatch.shift(x, 0.0, self.kind, live=live)


def recipe(fault: FaultBase, *, lanes: bool = False) -> Recipe | None:
    """How one kernel does this fault, on some `lanes` of it at least; None where it takes more than that."""
    magnitude = fault.asked()
    if (fault.sparsity < 1 and not lanes) or magnitude is None:
        return None
    if fault.kind in _NOISES:
        return Recipe(True, dispatch.RELATIVE if _NOISES[fault.kind] else dispatch.ADDITIVE, magnitude)
    if fault.kind in _SHIFTS:
        return Recipe(False, _SHIFTS[fault.kind], 1.0 + magnitude if fault.kind == "gain" else magnitude)
    return None

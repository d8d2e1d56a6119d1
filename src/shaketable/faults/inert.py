"""Whether a fault that changed nothing so far can be said to change nothing at all. Imports no torch."""

from __future__ import annotations

from shaketable.faults.base import FaultBase
from shaketable.faults.bits import BitFlip, Spike
from shaketable.faults.clipping import DeadZone, Saturation

ENOUGH = 256
"""Changes that were to be expected of a fault which has made none, for it to be called inert; rounding swallows some."""
NEVER = 1e-6
"""Fewer than this: a million times as many values would not show one either."""


def changes_nothing(fault: FaultBase, values: int) -> bool:
    """Whether a fault that has changed none of so many values that were not 0 can be said to change none at all."""
    expected = values * fault.sparsity * _share(fault)
    return values > 0 and not _waits_for_data(fault) and (expected >= ENOUGH or expected < NEVER)


def _share(fault: FaultBase) -> float:
    """The share of the values that a fault changes, roughly."""
    if isinstance(fault, Spike):
        return fault.rate
    return fault.magnitude if isinstance(fault, BitFlip | DeadZone) else 1.0


def _waits_for_data(fault: FaultBase) -> bool:
    """Whether the first passes say nothing about the later ones."""
    return isinstance(fault, Saturation) and fault.scope == "absolute"

"""The counts and measurements of one spot of a ledger: a module at a point, or an operator of a layer.

Spots hold sums, not averages: those of many processes are added. Only `inject/counters.py` writes to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import Any


@dataclass
class Measured:
    """Sums over the measured fires of one spot in one direction."""

    fires: int = 0
    square: float = 0.0
    """Sum of squared relative RMS errors."""
    values: int = 0
    changed: int = 0
    alive: int = 0
    """Values that were not zero before."""
    survived: int = 0
    """Those that were not zero after."""
    magnitudes: int = 0
    magnitude: float = 0.0
    """Sum of the magnitudes read back."""
    magnitude_square: float = 0.0
    """Sum of their squares."""

    def add(self, other: Measured) -> None:
        """Add another spot's sums."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def take(self, numbers: list[float]) -> None:
        """Add numbers in the order of the fields."""
        for name, number in zip(_SUMS, numbers, strict=True):
            before = getattr(self, name)
            setattr(self, name, before + (round(number) if isinstance(before, int) else number))

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean magnitude read back."""
        if self.magnitudes < 2:
            return math.inf
        mean = self.magnitude / self.magnitudes
        return math.sqrt(max(0.0, self.magnitude_square / self.magnitudes - mean * mean) / (self.magnitudes - 1))

    @property
    def error(self) -> float | None:
        """Relative RMS error."""
        return math.sqrt(self.square / self.fires) if self.fires else None


_SUMS = tuple(f.name for f in fields(Measured))


@dataclass
class Spot:
    """One module at one point, or one operator of one layer."""

    name: str
    layer: int | None
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Fires per phase: [forward, backward]."""
    recomputed: int = 0
    """Forward fires repeated by activation checkpointing; not among the counts."""
    seconds: float = 0.0
    forward: Measured = field(default_factory=Measured)
    backward: Measured = field(default_factory=Measured)
    lock: Any = field(default_factory=Lock, repr=False, compare=False)

    def fires(self, backward: bool) -> int:
        """Fires in one direction, over all phases."""
        return sum(c[backward] for c in self.counts.values())

    def add(self, other: Spot) -> None:
        """Add the same spot of another process."""
        for phase, (forward, backward) in other.counts.items():
            mine = self.counts.setdefault(phase, [0, 0])
            mine[0] += forward
            mine[1] += backward
        self.recomputed += other.recomputed
        self.seconds += other.seconds
        self.forward.add(other.forward)
        self.backward.add(other.backward)

    def copy(self) -> Spot:
        """The same counts and sums, with a lock of its own."""
        counts = {phase: list(both) for phase, both in self.counts.items()}
        return Spot(self.name, self.layer, counts, self.recomputed, self.seconds, replace(self.forward), replace(self.backward))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sums = {k: dict(vars(v)) for k, v in (("forward", self.forward), ("backward", self.backward)) if v.fires}
        return {
            "layer": self.layer,
            "counts": {k: list(v) for k, v in self.counts.items()},
            "recomputed": self.recomputed,
            "seconds": self.seconds,
            "measured": sums,
        }

    @classmethod
    def from_dict(cls, name: str, data: dict[str, Any]) -> Spot:
        """The inverse of `to_dict`."""
        spot = cls(name, data["layer"], data["counts"], data["recomputed"], data["seconds"])
        for direction, sums in data["measured"].items():
            setattr(spot, direction, Measured(**sums))
        return spot

"""What one spot of a ledger counts and measures: a module at a point, or an operator of a layer.

Some fires are measured by comparing the tensor before and after. Spots hold sums, not averages: those of many processes, and
those that a card's kernels have told, are added.

A large tensor is measured by rows spread over it, where its fault strikes every value by the same law. All of it takes a card
some ten passes in float64: half a second for the linears of 1.5 billion parameters, at every power of two. Faults that strike
few values, or whose magnitude is a share of the whole tensor's maximum, are measured on all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults import FaultBase

AT_HAND = 2**16
"""Values that are measured on the host: some forty launches and six waits for a card cost more than bringing them here."""

ENOUGH = 2**20
"""Values that tell a magnitude within a thousandth."""


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

    def take(self, fault: FaultBase, clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> None:
        """Measure one before/after pair."""
        if lanes is None and fault.strikes_alike and clean.dim() > 1 and clean.numel() > ENOUGH:
            clean, faulty = _spread(clean, faulty)
        if clean.device.type != "cpu" and clean.numel() <= AT_HAND:
            clean, faulty, lanes = clean.cpu(), faulty.cpu(), None if lanes is None else lanes.cpu()
        differs = clean.ne(faulty) & ~(clean.isnan() & faulty.isnan())
        finite = clean.isfinite() & faulty.isfinite()
        error = (faulty.double() - clean.double()).where(finite, 0.0).square().sum()
        size = clean.double().where(finite, 0.0).square().sum()
        changed, alive = int(differs.sum()), clean.ne(0)
        self.fires += 1
        self.values += clean.numel()
        self.changed += changed
        self.alive += int(alive.sum())
        self.survived += int((alive & faulty.ne(0)).sum())
        self.square += float(error) / float(size) if float(size) > 0 else 0.0
        self._read_back(fault, clean, faulty, lanes)

    def _read_back(self, fault: FaultBase, clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> None:
        self.tell(fault.read_back(clean, faulty, lanes) if clean.numel() else None)

    def tell(self, found: float | None) -> None:
        """One more magnitude that was read back; None where the values did not tell."""
        if found is not None and math.isfinite(found):
            self.magnitudes += 1
            self.magnitude += found
            self.magnitude_square += found * found

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


def _spread(clean: Tensor, faulty: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of both, evenly spread; everything, if those show no difference (gradients of most tokens may be zero)."""
    step = -(-clean.numel() // ENOUGH)
    some, same = (x.reshape(-1, x.shape[-1])[::step] for x in (clean, faulty))
    return (clean, faulty) if some.equal(same) else (some, same)


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

    def count(self, phase: str, backward: bool) -> int:
        """Count one fire; returns how many there have been in this direction."""
        with self.lock:
            if phase not in self.counts:
                self.counts[phase] = [0, 0]
            self.counts[phase][backward] += 1
            return self.counts[phase][backward] if len(self.counts) == 1 else self.fires(backward)

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

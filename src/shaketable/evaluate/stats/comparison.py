"""What a comparison of two arms says: a difference, how sure it is, and what it could not have seen.

A difference without an interval invites belief, and "not significant" without the smallest difference that could have
been seen invites the opposite belief. A `Comparison` carries all three and says them in one `sentence()`, so that no
report can quote one and lose the others. Differences are kept as fractions; people read points (percent).

"Distinguishable" is decided by the p-value alone, after Holm's correction where there was one. Interval and p come from
different constructions, so at the edge one may just include 0 and the other just reject; both are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shaketable.errors import ShaketableError


@dataclass(frozen=True)
class Interval:
    """A confidence interval by its ends."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True)
class Comparison:
    """Arm b against arm a, on the same problems. Scores and differences are fractions."""

    difference: float
    """mean(b) − mean(a)."""
    interval: Interval
    p: float
    """Two-sided, of no difference."""
    method: str
    """The test and the interval, by name, with any fallback that was taken."""
    over: str
    """What the difference was averaged over, in words."""
    detectable: float | None
    """Smallest true difference that this design sees with 80 % power; None when there is none."""
    problems: int
    seeds: tuple[int, int]
    """Seeds in arm a and in arm b."""
    level: float = 0.95
    note: str = ""
    """What the comparison does not speak of."""
    adjusted: float | None = None
    """p after Holm's correction, when it was one of several comparisons."""

    @property
    def distinguishable(self) -> bool:
        """Whether the (corrected) p-value is at or below 1 − level."""
        p = self.p if self.adjusted is None else self.adjusted
        return p <= 1 - self.level + 1e-12

    def sentence(self) -> str:
        """All of it for people, in one sentence."""
        low, high = points(self.interval.low), points(self.interval.high)
        p = _p(self.p) if self.adjusted is None else f"{_p(self.p)}, after Holm {_p(self.adjusted)}"
        facts = f"{points(self.difference)} points ({100 * self.level:g} % CI {low} to {high}, {p}, {self.over})"
        verdict = "distinguishable from none" if self.distinguishable else f"not distinguishable; {self._reach()}"
        return f"{facts}: {verdict}" + (f"; {self.note}" if self.note else "")

    def _reach(self) -> str:
        design = "this n and these seeds" if max(self.seeds) > 1 else "this n"
        if self.detectable is None:
            return f"with {design} no difference can be seen"
        return f"with {design} a difference of {100 * self.detectable:.1f} points can be seen"

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "difference": self.difference,
            "interval": self.interval.to_dict(),
            "level": self.level,
            "p": self.p,
            "adjusted": self.adjusted,
            "distinguishable": self.distinguishable,
            "method": self.method,
            "over": self.over,
            "problems": self.problems,
            "seeds": list(self.seeds),
            "detectable": self.detectable,
            "note": self.note,
            "sentence": self.sentence(),
        }


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: the k-th smallest of m times m − k + 1, never decreasing, at most 1."""
    if bad := next((p for p in ps if not 0 <= p <= 1), None):
        raise ShaketableError(f"a p-value lies between 0 and 1, not {bad}")
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[at]))
        adjusted[at] = largest
    return adjusted


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons as one family: each with its p after Holm's correction."""
    adjusted = holm([c.p for c in comparisons])
    return [replace(c, adjusted=p) for c, p in zip(comparisons, adjusted, strict=True)]


def points(fraction: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    text = f"{100 * fraction:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"

"""The share of a loss that came back, with its interval.

    share = (after − before) / (clean − before)          before, after: scores under the fault; clean: without it, before

A ratio of two means that are both uncertain, on the same problems. Its interval is Fieller's, made by turning a test round: R
belongs to it as long as the mean of d(R) = (after − before) − R·(clean − before) cannot be told from 0. The test is the one
that the difference itself would get (`tests.py`): crossed seeds and problems for several training seeds, Student's t with two
pseudo-problems for one. When the loss itself is not sure, the set has no end, and the interval says so by an infinite one.

Rejected: the delta method, symmetric by construction, which covers too little when the loss is small; the bootstrap, for the
reasons in `tests.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.stats.comparison import Interval
from shaketable.evaluate.stats.crossed_effects import MeanSquares

FARTHEST = 64.0
"""Shares beyond this are told as infinite."""


@dataclass(frozen=True)
class Recovered:
    """How much of what a fault took came back."""

    share: float
    interval: Interval
    taken: float
    """What the fault took: clean − before."""
    returned: float
    """after − before."""
    seeds: int
    problems: int
    level: float = 0.95

    def sentence(self) -> str:
        """For people."""
        low, high = (_percent(end) for end in (self.interval.low, self.interval.high))
        came = f"of the {100 * self.taken:.1f} points that the fault takes, {_points(self.returned)} came back"
        return f"{came}: {_percent(self.share)} ({100 * self.level:g} % CI {low} to {high})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {"share": self.share, "interval": self.interval.to_dict(), "taken": self.taken, "returned": self.returned}
        return {**numbers, "seeds": self.seeds, "problems": self.problems, "sentence": self.sentence()}


def share_recovered(before: ArrayLike, after: ArrayLike, clean: ArrayLike, *, level: float = 0.95) -> Recovered:
    """The share of the loss that came back.

    Args:
        before: Scores under the fault before the repair, (problems) or (training seeds, problems), from 0 to 1.
        after: The same after it.
        clean: Without the fault, before the repair.
        level: Of the interval.
    """
    b, a, c = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (before, after, clean))
    if not b.shape == a.shape == c.shape or not b.size:
        raise ShaketableError(f"a share needs the same problems three times, not {b.shape}, {a.shape} and {c.shape}")
    taken, returned = float((c - b).mean()), float((a - b).mean())
    if taken == 0:
        raise ShaketableError("the fault takes nothing: there is no share of it")

    def excess(share: float) -> float:
        """Below 0 inside of the interval."""
        d = np.round((a - b) - share * (c - b), 12)
        variance, freedom = _uncertainty(d)
        return float(d.mean()) ** 2 - float(stats.t.ppf((1 + level) / 2, freedom)) ** 2 * variance

    share = returned / taken
    seeds, problems = b.shape
    low, high = (_end(excess, share, side) for side in (-1.0, 1.0))
    return Recovered(share, Interval(low, high), taken, returned, seeds, problems, level)


def _uncertainty(d: NDArray[np.float64]) -> tuple[float, float]:
    """Variance of the mean and its degrees of freedom."""
    seeds, n = d.shape
    if seeds > 1 and n > 1 and np.ptp(d) > 0:
        squares = MeanSquares.of(d)
        return squares.variance, squares.freedom
    values = d.mean(0)
    wins = values[values != 0]
    size = math.sqrt(float((wins**2).mean())) if len(wins) else 1.0
    more = np.concatenate([values, [size, -size]])
    return float(more.var(ddof=1)) / len(more), len(more) - 1


def _end(excess: Callable[[float], float], inside: float, side: float) -> float:
    """Where the interval ends on one side."""
    step, last = 0.05, inside
    while step < FARTHEST:
        at = inside + side * step
        if excess(at) > 0:
            return float(optimize.brentq(excess, *sorted((last, at)), xtol=1e-6))
        step, last = 2 * step, at
    return side * math.inf


def _percent(share: float) -> str:
    if math.isinf(share):
        return "∞" if share > 0 else "−∞"
    return f"{round(100 * share)} %".replace("-", "−")


def _points(fraction: float) -> str:
    return f"{100 * fraction:.1f}".replace("-", "−")

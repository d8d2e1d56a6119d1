"""Intervals, tests, power and recovered shares for scores on problems and seeds.

Scores are fractions from 0 to 1 and the unit is the problem; a problem scored under several noise seeds counts once, by its
mean. `docs/statistics.md` says what each test assumes and how well its interval covers in simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from shaketable.errors import ShaketableError

Array = NDArray[np.float64]
LEVEL, POWER = 0.95, 0.8
DISCORDANCE, SEED_SD = 0.25, 0.01
"""Assumed before there are scores: the share of problems on which two arms disagree, and the spread over training seeds."""
FARTHEST = 64.0
"""Shares beyond this are reported as infinite."""


# ---- results


@dataclass(frozen=True)
class Interval:
    """A confidence interval by its ends."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


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
    adjusted: float | None = None
    """p after Holm's correction, when it was one of several comparisons."""

    @property
    def distinguishable(self) -> bool:
        """Whether the (corrected) p-value is at or below 5 %."""
        p = self.p if self.adjusted is None else self.adjusted
        return p <= 1 - LEVEL + 1e-12

    def sentence(self) -> str:
        low, high = points(self.interval.low), points(self.interval.high)
        p = _p(self.p) if self.adjusted is None else f"{_p(self.p)}, after Holm {_p(self.adjusted)}"
        facts = f"{points(self.difference)} points (95 % CI {low} to {high}, {p}, {self.over})"
        if self.distinguishable:
            return f"{facts}: distinguishable from none"
        least = "no difference" if self.detectable is None else f"a difference of {100 * self.detectable:.1f} points"
        return f"{facts}: not distinguishable; this design can see {least}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "distinguishable": self.distinguishable, "sentence": self.sentence()}


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: the k-th smallest of m times m − k + 1, never decreasing, at most 1."""
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


# ---- one sample, and two conditions


def wilson(rate: float, n: int) -> Interval:
    """Wilson's 95 % score interval of a rate over n problems.

    `rate` may be a mean over noise seeds; n is the number of problems all the same, which is never too narrow.
    """
    z = float(stats.norm.ppf((1 + LEVEL) / 2))
    centre, half = rate + z * z / (2 * n), z * math.sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
    low, high = (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
    return Interval(low if rate > 0 else 0.0, high if rate < 1 else 1.0)


def mean_interval(values: ArrayLike) -> Interval:
    """Student's t interval of a mean; no width where there is no spread."""
    found = np.asarray(values, dtype=np.float64)
    if np.ptp(found) == 0:
        return Interval(float(found[0]), float(found[0]))
    low, high = stats.t.interval(LEVEL, len(found) - 1, found.mean(), stats.sem(found))
    return Interval(float(low), float(high))


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Exact two-sided p of two 0/1 vectors over the same problems: a sign test of those on which they disagree."""
    d = np.subtract(np.asarray(a, float), b)
    lost, won = int((d > 0).sum()), int((d < 0).sum())
    return float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0


def paired(a: ArrayLike, b: ArrayLike, *, seed: int = 0, level: float = LEVEL) -> Comparison:
    """Two conditions on the same problems.

    Args:
        a: Scores (problems,) or (problems, noise seeds), from 0 to 1.
        b: The same problems in the same order; the number of seeds may differ.
        seed: Of the sign flips, where there are too many to try all.
        level: Of the test that `detectable` speaks of; the interval is one of 95 %.
    """
    first, second = _per_problem(a), _per_problem(b)
    if len(first) != len(second):
        raise ShaketableError(f"a paired comparison needs the same problems in both: got {len(first)} and {len(second)}")
    d = _rounded(second.mean(1) - first.mean(1))
    if _binary(first, second):
        p, test = mcnemar(first, second), "exact McNemar"
    else:
        p, test = sign_flip(d, seed=seed), "sign-flip permutation"
    method = f"{test}; t interval with two pseudo-problems"
    seeds = max(first.shape[1], second.shape[1])
    over = f"paired over {len(d)} problems" + (f", {seeds} noise seeds" if seeds > 1 else "")
    return Comparison(float(d.mean()), paired_interval(d), p, method, over, sign_flip_detectable(d, level=level))


def paired_interval(differences: ArrayLike) -> Interval:
    """Of a mean difference per problem: Student's t, with one pseudo-win for either side."""
    found = mean_interval(_with_pseudo_wins(np.asarray(differences, dtype=np.float64)))
    return Interval(max(found.low, -1.0), min(found.high, 1.0))


def _with_pseudo_wins(d: Array) -> Array:
    """The differences, and one of their root mean square for either side."""
    moved = d[d != 0]
    win = math.sqrt(float(np.mean(moved**2))) if len(moved) else 1.0
    return np.concatenate([d, [win, -win]])


def sign_flip(differences: ArrayLike, *, seed: int = 0, resamples: int = 9999) -> float:
    """Two-sided p of a mean of 0, when each difference could as well have had the other sign. Exact McNemar for −1, 0 and 1."""
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if len(d) < 2:
        return 1.0
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": resamples, "batch": 500}
    return float(stats.permutation_test((d,), np.mean, rng=np.random.default_rng(seed), **options).pvalue)


def over_seeds(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL) -> Comparison:
    """Two arms, each trained with the same seeds; of one seed, or without any spread, `paired` over problems.

    Args:
        a: Scores (training seeds, problems), from 0 to 1.
        b: The same seeds and problems in the same order.
        level: Of the test that `detectable` speaks of; the interval is one of 95 %.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise ShaketableError(f"the arms have other seeds or problems: {first.shape} and {second.shape}")
    d = _rounded(second - first)
    seeds, n = d.shape
    if seeds == 1 or n == 1 or np.ptp(d) == 0:
        return paired(first.T, second.T, level=level)
    squares, difference = MeanSquares.of(d), float(d.mean())
    se, freedom = math.sqrt(squares.variance), squares.freedom
    p = 2 * float(stats.t.sf(abs(difference) / se, freedom))
    half = se * float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return Comparison(
        difference,
        Interval(max(difference - half, -1.0), min(difference + half, 1.0)),
        p,
        f"crossed random effects of seeds and problems, t with {freedom:.3g} degrees of freedom",
        f"paired over {seeds} training seeds × {n} problems",
        t_detectable(se, freedom, level=level),
    )


def _per_problem(scores: ArrayLike) -> Array:
    """As (problems, noise seeds)."""
    found = np.asarray(scores, dtype=np.float64)
    return found[:, None] if found.ndim == 1 else found


def _binary(*scores: Array) -> bool:
    return all(s.shape[1] == 1 and bool(np.isin(s, (0, 1)).all()) for s in scores)


def _rounded(values: Array) -> Array:
    """Differences of means that are equal in truth are equal in bits."""
    return np.round(values, 12)


# ---- crossed effects of seeds and problems


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a table d[seed, problem] = μ + α_s + β_i + ε_si, each side with two rows or more."""

    by_seed: float
    by_problem: float
    rest: float
    seeds: int
    problems: int

    @classmethod
    def of(cls, table: Array) -> MeanSquares:
        seeds, problems = table.shape
        mean, rows, columns = table.mean(), table.mean(1, keepdims=True), table.mean(0, keepdims=True)
        by_seed = problems * ((rows - mean) ** 2).sum() / (seeds - 1)
        by_problem = seeds * ((columns - mean) ** 2).sum() / (problems - 1)
        rest = ((table - rows - columns + mean) ** 2).sum() / ((seeds - 1) * (problems - 1))
        return cls(float(by_seed), float(by_problem), float(rest), seeds, problems)

    @property
    def variance(self) -> float:
        """Of the grand mean, negative components set to 0."""
        a, b = max(self.by_seed, self.rest), max(self.by_problem, self.rest)
        return (a + b - self.rest) / (self.seeds * self.problems)

    @property
    def freedom(self) -> float:
        """Satterthwaite's degrees of freedom of `variance`, which must not be 0."""
        s, n = self.seeds - 1, self.problems - 1
        a, b = max(self.by_seed, self.rest), max(self.by_problem, self.rest)
        spread = a**2 / s + b**2 / n + self.rest**2 / (s * n)
        return max((a + b - self.rest) ** 2 / spread, float(min(s, n)))


# ---- power


def planned_detectable(problems: int, seeds: int) -> float | None:
    """The smallest difference that a planned comparison of two or more seeds would see, before there are scores.

    It assumes that two runs disagree on a quarter of the problems, half of these the same under every seed, and that the true
    difference has a standard deviation of one point over seeds.
    """
    if problems < 2:
        return None
    half = DISCORDANCE / 2
    squares = MeanSquares(problems * SEED_SD**2 + half, seeds * half + half, half, seeds, problems)
    return t_detectable(math.sqrt(squares.variance), squares.freedom)


def t_detectable(se: float, freedom: float, *, level: float = LEVEL, largest: float = 1.0) -> float | None:
    """The smallest difference that a two-sided t-test of that standard error sees; None beyond the largest there can be."""
    edge = stats.t.isf((1 - level) / 2, freedom)

    def short(noncentrality: float) -> float:
        return float(stats.nct.sf(edge, freedom, noncentrality)) - POWER

    found = se * float(optimize.brentq(short, 0.0, 10 * edge + 10, xtol=1e-6))
    return found if found <= largest else None


def sign_flip_detectable(differences: Array, *, level: float = LEVEL) -> float | None:
    """The smallest mean difference that a sign-flip or McNemar test sees, given the spread of the differences per problem.

    By Student's t with a correction for continuity, and never less than exact tests need: some problems must differ, all in one
    direction, before they can reject at all. None where there are fewer problems than that (six at 5 %).
    """
    n, moved = len(differences), np.abs(differences[differences != 0])
    fewest = math.ceil(math.log2(2 / (1 - level)) - 1e-9)
    if n < fewest:
        return None
    size = float(moved.mean()) if len(moved) else 1.0
    floor = size * float(stats.beta.ppf(POWER, fewest, n - fewest + 1))
    smooth = t_detectable(float(differences.std(ddof=1)) / math.sqrt(n), n - 1, level=level)
    return None if smooth is None else max(floor, smooth + size / n if len(moved) else 0.0)


# ---- recovered shares


@dataclass(frozen=True)
class Recovered:
    """The recovered share of what a fault took."""

    share: float
    interval: Interval
    taken: float
    """What the fault took: clean − before."""
    returned: float
    """after − before."""
    seeds: int
    problems: int

    def sentence(self) -> str:
        low, high = (_percent(end) for end in (self.interval.low, self.interval.high))
        came = f"of the {100 * self.taken:.1f} points that the fault costs, {points(self.returned).lstrip('+')} were recovered"
        return f"{came}: {_percent(self.share)} (95 % CI {low} to {high})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence()}


def share_recovered(before: ArrayLike, after: ArrayLike, clean: ArrayLike) -> Recovered:
    """The share of the loss that was recovered.

    Args:
        before: Scores under the fault before the repair, (problems) or (training seeds, problems), from 0 to 1.
        after: The same after it.
        clean: Without the fault, before the repair.
    """
    b, a, c = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (before, after, clean))
    taken, returned = float((c - b).mean()), float((a - b).mean())
    if taken == 0:
        raise ShaketableError("the fault costs nothing, so there is nothing to recover")

    def excess(share: float) -> float:
        """Below 0 inside of the interval."""
        d = np.round((a - b) - share * (c - b), 12)
        variance, freedom = _uncertainty(d)
        return float(d.mean()) ** 2 - float(stats.t.ppf((1 + LEVEL) / 2, freedom)) ** 2 * variance

    share = returned / taken
    seeds, problems = b.shape
    low, high = (_end(excess, share, side) for side in (-1.0, 1.0))
    return Recovered(share, Interval(low, high), taken, returned, seeds, problems)


def _uncertainty(d: Array) -> tuple[float, float]:
    """Variance of the mean and its degrees of freedom."""
    seeds, n = d.shape
    if seeds > 1 and n > 1 and np.ptp(d) > 0:
        squares = MeanSquares.of(d)
        return squares.variance, squares.freedom
    more = _with_pseudo_wins(d.mean(0))
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

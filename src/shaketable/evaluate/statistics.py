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
ONE_RUN = "this speaks of one training run only"
LEVEL, POWER = 0.95, 0.8
DISCORDANCE = 0.25
"""Share of problems on which two arms are assumed to disagree before there are scores."""
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
    note: str = ""
    """What the comparison does not speak of."""
    adjusted: float | None = None
    """p after Holm's correction, when it was one of several comparisons."""

    @property
    def distinguishable(self) -> bool:
        """Whether the (corrected) p-value is at or below 5 %."""
        p = self.p if self.adjusted is None else self.adjusted
        return p <= 1 - LEVEL + 1e-12

    def sentence(self) -> str:
        """All of it for people, in one sentence."""
        low, high = points(self.interval.low), points(self.interval.high)
        p = _p(self.p) if self.adjusted is None else f"{_p(self.p)}, after Holm {_p(self.adjusted)}"
        facts = f"{points(self.difference)} points (95 % CI {low} to {high}, {p}, {self.over})"
        verdict = "distinguishable from none" if self.distinguishable else f"not distinguishable; {self._reach()}"
        return f"{facts}: {verdict}" + (f"; {self.note}" if self.note else "")

    def _reach(self) -> str:
        design = "this n and these seeds" if max(self.seeds) > 1 else "this n"
        if self.detectable is None:
            return f"with {design} no difference can be seen"
        return f"with {design} a difference of {100 * self.detectable:.1f} points can be seen"

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        verdict = {"distinguishable": self.distinguishable, "sentence": self.sentence()}
        return {**asdict(self), "seeds": list(self.seeds), **verdict}


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


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Exact two-sided p of two 0/1 vectors over the same problems: a sign test of those on which they disagree."""
    d = np.subtract(a, b)
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
        reach = mcnemar_detectable(len(d), float(np.mean(d != 0)), level=level)
    else:
        p, test = sign_flip(d, seed=seed), "sign-flip permutation"
        reach = sign_flip_detectable(d, level=level)
    seeds = first.shape[1], second.shape[1]
    method = f"{test}; t interval with two pseudo-problems"
    return Comparison(float(d.mean()), paired_interval(d), p, method, _over(len(d), seeds), reach, len(d), seeds)


def paired_interval(differences: ArrayLike) -> Interval:
    """Of a mean difference per problem: Student's t, with one pseudo-win for either side."""
    more = _with_pseudo_wins(np.asarray(differences, dtype=np.float64))
    low, high = stats.t.interval(LEVEL, len(more) - 1, more.mean(), stats.sem(more))
    return Interval(max(float(low), -1.0), min(float(high), 1.0))


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
    if seeds == 1:
        return replace(paired(first.T, second.T, level=level), note=ONE_RUN)
    if n == 1 or np.ptp(d) == 0:
        found = paired(first.T, second.T, level=level)
        return replace(found, method=f"no spread between the training seeds, so over problems: {found.method}")
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
        n,
        (seeds, seeds),
    )


def _over(n: int, seeds: tuple[int, int]) -> str:
    runs = f"{seeds[0]}" if seeds[0] == seeds[1] else f"{seeds[0]} and {seeds[1]}"
    return f"paired over {n} problem{'s' * (n > 1)}" + (f", {runs} seeds each" if max(seeds) > 1 else "")


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
        """From a table (seeds, problems)."""
        seeds, problems = table.shape
        mean, rows, columns = table.mean(), table.mean(1, keepdims=True), table.mean(0, keepdims=True)
        by_seed = problems * ((rows - mean) ** 2).sum() / (seeds - 1)
        by_problem = seeds * ((columns - mean) ** 2).sum() / (problems - 1)
        rest = ((table - rows - columns + mean) ** 2).sum() / ((seeds - 1) * (problems - 1))
        return cls(float(by_seed), float(by_problem), float(rest), seeds, problems)

    @classmethod
    def expected(cls, seeds: int, problems: int, *, seed: float, problem: float, rest: float) -> MeanSquares:
        """From the variances of the three effects: what a study would find on average."""
        return cls(problems * seed + rest, seeds * problem + rest, rest, seeds, problems)

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

    @property
    def seed_sd(self) -> float:
        """Standard deviation of the true difference over training seeds."""
        return math.sqrt(max(self.by_seed - self.rest, 0.0) / self.problems)


# ---- power


def detectable(
    problems: int, *, discordance: float = DISCORDANCE, seeds: int = 1, seed_sd: float = 0.0, shared: float = 0.5
) -> float | None:
    """The smallest difference a planned comparison would see; None when there is none.

    Args:
        problems: How many problems both arms answer.
        discordance: Share of problems on which two runs disagree.
        seeds: Training seeds of each arm. One speaks of that one run only, and `seed_sd` does not enter.
        seed_sd: Standard deviation, over training seeds, of the true difference (0.01 is one point).
        shared: How much of the disagreement is on the same problems under every seed, and is not averaged away by more of
            them. With four seeds or more, 1 is the cautious end; 0 means that each seed disagrees independently.
    """
    if seeds == 1:
        return mcnemar_detectable(problems, discordance)
    if problems == 1:
        return t_detectable(seed_sd / math.sqrt(seeds), seeds - 1)
    parts = {"seed": seed_sd**2, "problem": shared * discordance, "rest": (1 - shared) * discordance}
    squares = MeanSquares.expected(seeds, problems, **parts)
    return t_detectable(math.sqrt(squares.variance), squares.freedom)


def mcnemar_detectable(problems: int, discordance: float, *, level: float = LEVEL) -> float | None:
    """The smallest difference that the exact McNemar test sees. None with fewer than six problems at 5 %."""

    def short(difference: float) -> float:
        return mcnemar_power(problems, max(discordance, difference), difference, level=level) - POWER

    return float(optimize.brentq(short, 0.0, 1.0, xtol=1e-6)) if short(1.0) >= 0 else None


def mcnemar_power(problems: int, discordance: float, difference: float, *, level: float = LEVEL) -> float:
    """Probability that the exact two-sided McNemar test rejects."""
    if discordance < 1e-12:
        return 0.0
    m = np.arange(problems + 1)
    tail = (1 - level) / 2
    fewest = stats.binom.ppf(tail, m, 0.5)
    fewest = np.where(stats.binom.cdf(fewest, m, 0.5) > tail + 1e-12, fewest - 1, fewest)
    wins = (1 + difference / discordance) / 2
    rejects = stats.binom.cdf(fewest, m, 1 - wins) + stats.binom.cdf(fewest, m, wins)
    return float(np.sum(stats.binom.pmf(m, problems, discordance) * rejects))


def t_detectable(se: float, freedom: float, *, level: float = LEVEL) -> float | None:
    """The smallest difference that a two-sided t-test of that standard error sees; None when it is beyond 100 points."""
    edge = stats.t.isf((1 - level) / 2, freedom)

    def short(noncentrality: float) -> float:
        return float(stats.nct.sf(edge, freedom, noncentrality)) - POWER

    found = se * float(optimize.brentq(short, 0.0, 10 * edge + 10, xtol=1e-6))
    return found if found <= 1 else None


def sign_flip_detectable(differences: Array, *, level: float = LEVEL) -> float | None:
    """The smallest mean difference that a sign-flip test sees, given the spread of the differences per problem.

    Student's t approximates it, too hopefully when few problems differ: a test of signs needs enough of them to reject at all.
    """
    n, moved = len(differences), np.abs(differences[differences != 0])
    floor = mcnemar_detectable(n, 0.0, level=level)
    if floor is None:
        return None
    floor *= float(moved.mean()) if len(moved) else 1.0
    smooth = t_detectable(float(differences.std(ddof=1)) / math.sqrt(n), n - 1, level=level)
    return None if smooth is None else max(floor, smooth)


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
        """For people."""
        low, high = (_percent(end) for end in (self.interval.low, self.interval.high))
        came = f"of the {100 * self.taken:.1f} points that the fault costs, {_points(self.returned)} were recovered"
        return f"{came}: {_percent(self.share)} (95 % CI {low} to {high})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {"share": self.share, "interval": self.interval.to_dict(), "taken": self.taken, "returned": self.returned}
        return {**numbers, "seeds": self.seeds, "problems": self.problems, "sentence": self.sentence()}


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


def _points(fraction: float) -> str:
    return f"{100 * fraction:.1f}".replace("-", "−")

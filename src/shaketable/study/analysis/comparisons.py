"""The differences that a study asked for, each with all that a statistician wants to see beside it, and the verdict.

The difference is a − b. Scores and losses per problem are compared over seeds × problems, crossed (`evaluate.statistics`);
numbers per run, such as seconds per step, by a paired t over seeds.

Holm's correction has two families. The primary comparison was named before the run and stands alone; all others are one family,
and are called exploratory; the smallest difference that they could have shown allows for their number. One seed in either arm
concludes nothing about a recipe, whatever its p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from shaketable.evaluate.statistics import (
    Comparison,
    Interval,
    corrected,
    over_seeds,
    share_recovered,
    t_detectable,
)
from shaketable.study.analysis.results import (
    ComparisonResult,
    RecoveredResult,
    SeedValue,
    StepComparison,
    StepDifference,
    StudyVerdict,
)
from shaketable.study.config import CLEAN, OWN, PER_PROBLEM, Comparing, StudyConfig
from shaketable.study.runs import Run

UNITS = {
    "accuracy": ("points", 100.0),
    "formatted": ("points", 100.0),
    "aqn_share": ("points", 100.0),
    "seconds_per_step": ("s", 1.0),
    "loss": ("nats", 1.0),
}
NAMES = {"seconds_per_step": "seconds per step", "aqn_share": "share of time in AQN", "reward": "final reward"}
Rows = list[list[float]]


@dataclass(frozen=True)
class Paired:
    """The numbers of two arms, a row for every seed that both have."""

    what: Comparing
    seeds: list[int]
    a: Rows
    b: Rows

    @classmethod
    def of(cls, what: Comparing, runs: Sequence[Run], step: int | None = None) -> Paired:
        rows = [{r.seed: _row(r, what, step) for r in runs if r.arm == arm and r.is_done} for arm in (what.a, what.b)]
        seeds = sorted(s for s in rows[0] if s in rows[1] and s is not None and rows[0][s] and rows[1][s])
        return cls(what, seeds, [rows[0][s] for s in seeds], [rows[1][s] for s in seeds])

    @property
    def per_problem(self) -> bool:
        """Whether there is a score for every problem."""
        return self.what.endpoint in PER_PROBLEM

    @property
    def is_enough(self) -> bool:
        """Whether there is a common seed, or two for a number per run."""
        return len(self.seeds) > (0 if self.per_problem else 1)

    def compared(self, level: float = 0.95) -> Comparison:
        """The difference; `level` is that of the test that `detectable` speaks of."""
        if not self.per_problem:
            return _values([x[0] for x in self.b], [x[0] for x in self.a], level)
        if self.what.endpoint != "loss":
            return over_seeds(self.b, self.a, level=level)
        # The test knows scores from 0 to 1: losses are divided by the largest, and what it found is multiplied again.
        a, b = np.array(self.a), np.array(self.b)
        scale = max(float(a.max()), float(b.max())) or 1.0
        found = over_seeds(b / scale, a / scale, level=level)
        ends = Interval(scale * found.interval.low, scale * found.interval.high)
        reach = found.detectable and scale * found.detectable
        return replace(found, difference=scale * found.difference, interval=ends, detectable=reach)


def compare(asked: Sequence[Comparing], primary: Comparing | None, runs: Sequence[Run]) -> list[ComparisonResult]:
    pairs = [Paired.of(what, runs) for what in asked]
    done: dict[int, Comparison] = {}
    for family in (True, False):
        members = [i for i, pair in enumerate(pairs) if pair.is_enough and (pair.what == primary) is family]
        level = 1 - 0.05 / max(1, len(members))
        done |= dict(zip(members, corrected([pairs[i].compared(level) for i in members]), strict=True))
    return [_result(pair, done.get(i), pair.what == primary) for i, pair in enumerate(pairs)]


def _row(run: Run, what: Comparing, step: int | None = None) -> list[float]:
    if what.condition is not None:
        return run.scores(what.condition, what.endpoint, step)
    value = run.value(what.endpoint) if step is None else run.at_step(what.endpoint, step)
    return [] if value is None else [value]


def _values(a: list[float], b: list[float], level: float) -> Comparison:
    """Paired t over seeds, of numbers that need not lie between 0 and 1."""
    d = np.round(np.subtract(b, a), 12)
    n, mean, over = len(d), float(d.mean()), "paired t over training seeds"
    if np.ptp(d) == 0:
        return Comparison(mean, Interval(mean, mean), 1.0 if mean == 0 else 2 * 0.5**n, "no spread", over, None)
    test = stats.ttest_1samp(d, 0.0)
    low, high = test.confidence_interval(0.95)
    reach = t_detectable(float(stats.sem(d)), n - 1, level=level, largest=math.inf)
    return Comparison(mean, Interval(float(low), float(high)), float(test.pvalue), over, over, reach)


def _result(pair: Paired, found: Comparison | None, primary: bool) -> ComparisonResult:
    what, n = pair.what, len(pair.seeds)
    unit, scale = UNITS.get(what.endpoint, ("", 1.0))
    problems = len(pair.a[0]) if pair.per_problem and n else None
    differences = [float(np.mean(a) - np.mean(b)) for a, b in zip(pair.a, pair.b, strict=True)]
    numbers: dict[str, Any] = {}
    if found is not None:
        ends = {"ci_low": found.interval.low, "ci_high": found.interval.high, "detectable": found.detectable}
        numbers = {"difference": found.difference, **ends, "p": found.p, "p_holm": found.adjusted}
    return ComparisonResult(
        **what.model_dump(),
        **numbers,
        unit=unit,
        scale=scale,
        seeds=n,
        problems=problems,
        per_seed=tuple(SeedValue(seed=s, value=value) for s, value in zip(pair.seeds, differences, strict=True)),
        primary=primary,
        verdict="nothing" if found is None or n < 2 else "shown" if found.distinguishable else "not shown",
        method=None if found is None else found.method,
        sentence=_sentence(pair, found, unit, scale),
    )


def _sentence(pair: Paired, found: Comparison | None, unit: str, scale: float) -> str:
    what, n = pair.what, len(pair.seeds)
    endpoint = NAMES.get(what.endpoint, what.endpoint)
    head = f"{what.a} − {what.b}, {f'{what.condition} ' if what.condition else ''}{endpoint}"
    if found is None:
        return f"{head}: nothing can be concluded, too few seeds are finished in both arms"
    unit = f" {unit}" if unit else ""
    ends = f"95 % CI {_signed(found.interval.low, scale)} … {_signed(found.interval.high, scale)}"
    facts = f"{head}: {_signed(found.difference, scale)}{unit}, {ends}, {n} seed{'s' * (n > 1)}"
    if n < 2:
        return f"{facts}: nothing can be concluded about the recipes (one run of each)"
    p = f"p = {found.p:.2g}" if found.p >= 0.001 else "p < 0.001"
    if found.adjusted is not None and not math.isclose(found.adjusted, found.p):
        p += f", after Holm {found.adjusted:.2g}" if found.adjusted >= 0.001 else ", after Holm < 0.001"
    if found.distinguishable:
        return f"{facts}: shown ({p})"
    if found.detectable is None:
        return f"{facts}: not shown ({p}; no difference could have been seen)"
    size = abs(scale * found.detectable)
    shown = f"{size:.1f}" if scale == 100 else f"{size:.2g}"
    return f"{facts}: not shown ({p}; a true difference of {shown}{unit} would have been seen with 80 % power)"


def _signed(value: float, scale: float) -> str:
    shown = f"{scale * value:+.1f}" if scale == 100 else f"{scale * value:+.3g}"
    return "0.0" if float(shown) == 0 else shown.replace("-", "−")


# ---- step by step


def at_steps(study: StudyConfig, runs: Sequence[Run]) -> list[StepComparison]:
    """Every arm against the baseline at the steps that the study names, or at all at which both were scored before the last.

    The baseline is `compare.against`, else the second arm of the primary comparison. Intervals are of each step alone.
    """
    primary = study.compare.primary
    base = study.compare.against or (primary.b if primary is not None else None)
    if base is None:
        return []
    found = []
    for arm in study.arms:
        pair = [[r for r in runs if r.arm == name and r.is_done] for name in (arm, base)]
        if not study.comparable(arm, base) or not all(pair):
            continue
        steps = study.report.steps
        if not steps:
            common = set.intersection(*({e["step"] for e in run.of_kind("evaluation")} for both in pair for run in both))
            steps = tuple(sorted(common)) if len(common) > 2 else ()
        for condition in [*(c for c in study.conditions if c != OWN), None]:
            what = Comparing(a=arm, b=base, condition=condition, endpoint="reward" if condition is None else "accuracy")
            points = [point for step in steps if (point := _at_step(what, runs, step)) is not None]
            unit, scale = UNITS.get(what.endpoint, ("", 1.0))
            name = what.endpoint if condition is None else f"{what.endpoint}, {condition}"
            if len(points) > 1 or (points and study.report.steps):
                found.append(StepComparison(a=arm, b=base, curve=name, unit=unit, scale=scale, points=tuple(points)))
    return found


def _at_step(what: Comparing, runs: Sequence[Run], step: int) -> StepDifference | None:
    pair = Paired.of(what, runs, step)
    if not pair.is_enough:
        return None
    found = pair.compared()
    ends = (found.interval.low, found.interval.high) if len(pair.seeds) > 1 else (None, None)
    return StepDifference(step=step, difference=found.difference, ci_low=ends[0], ci_high=ends[1], seeds=len(pair.seeds))


# ---- repairs


def recovered(conditions: Iterable[str], done: Mapping[str, Sequence[Run]]) -> list[RecoveredResult]:
    """The share of a fault's loss that each hardened arm recovered, for every condition under which something was lost.

    Every hardened run was scored before its first step and after its last, on the same problems and with the same noise: each
    run is its own baseline. Arms that are trained are left out: a model that learns its task gets better with and without a
    fault.
    """
    found = []
    for arm, runs in done.items():
        hardened = [r for r in runs if r.kind == "harden" and len(e := r.of_kind("evaluation")) > 1 and e[0]["step"] == 0]
        for condition in conditions:
            scored = [r for r in hardened if r.scores(condition, "accuracy") and r.scores(condition, "accuracy", 0)]
            if condition == CLEAN or not scored:
                continue
            before, clean = (np.array([r.scores(c, "accuracy", 0) for r in scored]) for c in (condition, CLEAN))
            after, clean_after = (np.array([r.scores(c, "accuracy") for r in scored]) for c in (condition, CLEAN))
            if (clean - before).mean() > 0:
                means = {"before": before, "after": after, "clean": clean, "clean_after": clean_after}
                facts = share_recovered(before, after, clean).to_dict() | {name: float(m.mean()) for name, m in means.items()}
                found.append(RecoveredResult(arm=arm, condition=condition, **facts))
    return found


# ---- the verdict


def verdict(compared: Sequence[ComparisonResult], runs: Sequence[Run], unlike: Sequence[str]) -> StudyVerdict:
    """Kind, headline, and the sentence of the primary comparison; `unlike` says why runs cannot be compared."""
    primary = next((c for c in compared if c.primary), None)
    if primary is None:
        return StudyVerdict(kind="nothing", headline="No comparison was named", sentence="There is nothing to decide.")
    if unlike:
        headline = f"Nothing can be concluded: {unlike[0]}"
        return StudyVerdict(kind="nothing", headline=headline, sentence=primary.sentence)
    missing = sum(not run.is_done for run in runs)
    so_far = f"So far ({missing} of {len(runs)} runs are missing): " if missing else ""
    headline = so_far + _headline(primary)
    return StudyVerdict(kind=primary.verdict, headline=headline[:1].upper() + headline[1:], sentence=primary.sentence)


def _headline(primary: ComparisonResult) -> str:
    a, b = primary.a, primary.b
    endpoint = primary.endpoint.replace("_", " ")
    where = f" in {primary.condition} {endpoint}" if primary.condition else f" in {endpoint}"
    if primary.verdict == "nothing" or primary.difference is None:
        return f"nothing can be concluded: {'there is one seed' if primary.seeds else 'no seed is finished in both arms'}"
    if primary.verdict == "not shown":
        return f"not shown: no difference between {a} and {b}{where} could be told from chance"
    size = abs(primary.scale * primary.difference)
    unit = f" {primary.unit}" if primary.unit else ""
    return f"shown: {a} is {size:.3g}{unit} {'above' if primary.difference > 0 else 'below'} {b}{where}"

"""The differences a study asked for, each with what a statistician wants to see beside it, in one sentence.

The difference is a − b. Scores and losses per problem are compared over seeds × problems, crossed (`evaluate.stats.tests`);
numbers per run, such as seconds per step, by a paired t over seeds. Beside the p that decides stand two exact ones that assume
less: the sign-flip test over the seeds' differences (five seeds cannot reach 5 % with it), and McNemar's for each seed.

Holm's correction has two families. The primary comparison was named before the run and stands alone; all others are one family,
and are called exploratory; the smallest difference that they could have shown allows for their number. One seed in either arm
concludes nothing about a recipe, whatever its p: the verdict is "nothing".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from shaketable.evaluate.statistics import Comparison, Interval, corrected, mcnemar, over_seeds, sign_flip, t_detectable
from shaketable.study.analysis.runs import Run
from shaketable.study.config import PER_PROBLEM, Comparing

UNITS = {
    "accuracy": ("points", 100.0),
    "formatted": ("points", 100.0),
    "aqn_share": ("points", 100.0),
    "seconds_per_step": ("s", 1.0),
    "loss": ("nats", 1.0),
}
NAMES = {"seconds_per_step": "seconds per step", "aqn_share": "share of time in AQN", "reward": "final reward"}


@dataclass(frozen=True)
class Asked:
    """A comparison and the seeds that both arms have."""

    what: Comparing
    seeds: list[int]
    a: list[list[float]]
    """A row for every seed."""
    b: list[list[float]]

    @classmethod
    def of(cls, what: Comparing, runs: Sequence[Run]) -> Asked:
        """From the finished runs of both arms, paired by their seeds."""
        rows = [{r.seed: _row(r, what) for r in runs if r.arm == arm and r.is_done} for arm in (what.a, what.b)]
        seeds = [s for s in rows[0] if s in rows[1] and s is not None and rows[0][s] and rows[1][s]]
        return cls(what, sorted(seeds), [rows[0][s] for s in sorted(seeds)], [rows[1][s] for s in sorted(seeds)])

    @property
    def per_problem(self) -> bool:
        """Whether there is a score for every problem."""
        return self.what.endpoint in PER_PROBLEM

    def compared(self) -> Comparison | None:
        """The difference; None without a common seed, or when one run is all there is of a number per run."""
        if not self.seeds or (not self.per_problem and len(self.seeds) < 2):
            return None
        return self._over_seeds() if self.per_problem else _values([x[0] for x in self.b], [x[0] for x in self.a])

    def _over_seeds(self, level: float = 0.95) -> Comparison:
        """The test knows scores from 0 to 1; a loss is divided by the largest for it, and what it found is multiplied again."""
        if self.what.endpoint != "loss":
            return over_seeds(self.b, self.a, level=level)
        a, b = np.array(self.a), np.array(self.b)
        scale = max(float(a.max()), float(b.max())) or 1.0
        found = over_seeds(b / scale, a / scale, level=level)
        ends = Interval(scale * found.interval.low, scale * found.interval.high)
        reach = found.detectable and scale * found.detectable
        return replace(found, difference=scale * found.difference, interval=ends, detectable=reach)

    def detectable(self, level: float) -> float | None:
        """The smallest difference seen with 80 % power at a level that allows for the whole family (Bonferroni's)."""
        if self.per_problem:
            return self._over_seeds(level).detectable
        return _values([x[0] for x in self.b], [x[0] for x in self.a], level).detectable

    def differences(self) -> list[float]:
        """One for every seed."""
        return [float(np.mean(a) - np.mean(b)) for a, b in zip(self.a, self.b, strict=True)]


def compare(asked: Sequence[Comparing], primary: Comparing | None, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All comparisons for JSON, in the order given."""
    found = [Asked.of(what, runs) for what in asked]
    raw = [one.compared() for one in found]
    done: dict[int, Comparison] = {}
    for family in (True, False):
        members = [i for i, c in enumerate(raw) if c is not None and (asked[i] == primary) is family]
        level = 1 - 0.05 / max(1, len(members))
        wide = [replace(c, detectable=found[i].detectable(level)) for i in members if (c := raw[i]) is not None]
        done |= dict(zip(members, corrected(wide), strict=True))
    return [_to_dict(one, done.get(i), one.what == primary) for i, one in enumerate(found)]


def _row(run: Run, what: Comparing) -> list[float]:
    if what.condition is not None:
        return run.scores(what.condition, what.endpoint)
    value = run.value(what.endpoint)
    return [] if value is None else [value]


def _values(a: list[float], b: list[float], level: float = 0.95) -> Comparison:
    """Paired t over seeds, of numbers that need not lie between 0 and 1."""
    d = np.round(np.subtract(b, a), 12)
    n, mean = len(d), float(d.mean())
    method = "paired t over training seeds"
    if np.ptp(d) == 0:
        p = 1.0 if mean == 0 else 2 * 0.5**n
        return Comparison(mean, Interval(mean, mean), p, f"no spread: {method}", "", None, 1, (n, n))
    se = float(stats.sem(d))
    half = se * float(stats.t.ppf((1 + level) / 2, n - 1))
    p = 2 * float(stats.t.sf(abs(mean) / se, n - 1))
    scale = 1e3 * se  # t_detectable speaks of fractions, and knows none above 1
    reach = t_detectable(se / scale, n - 1, level=level)
    interval = Interval(mean - half, mean + half)
    return Comparison(mean, interval, p, method, "", reach and reach * scale, 1, (n, n))


def _to_dict(asked: Asked, found: Comparison | None, primary: bool) -> dict[str, Any]:
    what = asked.what
    unit, scale = UNITS.get(what.endpoint, ("", 1.0))
    verdict = "nothing" if found is None or len(asked.seeds) < 2 else "shown" if found.distinguishable else "not shown"
    differences = asked.differences()
    binary = asked.per_problem and bool(asked.seeds) and {*np.ravel([asked.a, asked.b])} <= {0.0, 1.0}
    return {
        "a": what.a,
        "b": what.b,
        "condition": what.condition,
        "endpoint": what.endpoint,
        "unit": unit,
        "scale": scale,
        "difference": found and found.difference,
        "ci_low": found and found.interval.low,
        "ci_high": found and found.interval.high,
        "p": found and found.p,
        "p_holm": found and found.adjusted,
        "p_seeds": sign_flip(differences) if len(differences) > 1 else None,
        "mcnemar": [mcnemar(b, a) for a, b in zip(asked.a, asked.b, strict=True)] if binary else [],
        "detectable": found and found.detectable,
        "seeds": len(asked.seeds),
        "problems": len(asked.a[0]) if asked.per_problem and asked.seeds else None,
        "per_seed": [{"seed": s, "value": d} for s, d in zip(asked.seeds, differences, strict=True)],
        "primary": primary,
        "verdict": verdict,
        "method": found and found.method,
        "sentence": _sentence(asked, found, unit, scale),
    }


def _sentence(asked: Asked, found: Comparison | None, unit: str, scale: float) -> str:
    what, n = asked.what, len(asked.seeds)
    endpoint = NAMES.get(what.endpoint, what.endpoint)
    head = f"{what.a} − {what.b}, {f'{what.condition} ' if what.condition else ''}{endpoint}"
    if found is None:
        return (
            f"{head}: nothing can be concluded, {'no seed is' if n == 0 else 'one seed is all that is'} finished in both arms"
        )
    sign, unit = _signed(scale), f" {unit}" if unit else ""
    ends = f"95 % CI {sign(found.interval.low)} … {sign(found.interval.high)}"
    facts = f"{head}: {sign(found.difference)}{unit}, {ends}, {n} seed{'s' * (n > 1)}"
    if n < 2:
        return f"{facts}: nothing can be concluded about the recipes (one run of each; the seed may be all of it)"
    p = f"p = {found.p:.2g}" if found.p >= 0.001 else "p < 0.001"
    if found.adjusted is not None and not math.isclose(found.adjusted, found.p):
        p += f", after Holm {found.adjusted:.2g}" if found.adjusted >= 0.001 else ", after Holm < 0.001"
    if found.distinguishable:
        return f"{facts}: shown ({p})"
    return f"{facts}: not shown ({p}; {_reach(found, unit, scale)})"


def _reach(found: Comparison, unit: str, scale: float) -> str:
    if found.detectable is None:
        return "these seeds and problems can show no difference at all"
    size = abs(scale * found.detectable)
    shown = f"{size:.1f}" if scale == 100 else f"{size:.2g}"
    return f"a true difference of {shown}{unit} would have been seen with 80 % power"


def _signed(scale: float) -> Any:
    def text(value: float) -> str:
        shown = f"{scale * value:+.1f}" if scale == 100 else f"{scale * value:+.3g}"
        return "0.0" if float(shown) == 0 else shown.replace("-", "−")

    return text

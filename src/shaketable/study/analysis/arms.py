"""The results of an arm, from the records of its finished runs: scores, curves, σ, proof, mechanism, cost, examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from shaketable.evaluate.statistics import Interval, MeanSquares, wilson
from shaketable.evaluate.statistics import mean_interval as over_problems
from shaketable.evaluate.sweep.results import merged_sites
from shaketable.plan import Plan
from shaketable.study.analysis.results import (
    ArmScore,
    Cost,
    Curve,
    CurvePoint,
    LayerResult,
    MechanismResult,
    Proof,
    Sample,
    SeedValue,
)
from shaketable.study.runs import Event, Run

CURVES = {
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "kl_sampler_trainer": "KL(sampler‖trainer)",
    "grad_norm": "gradient norm",
}
SHARES = ("accuracy", "formatted")
"""Endpoints that lie between 0 and 1 and are read in points; the loss is read in nats."""


# ---- scores


def scores(runs: Sequence[Run], conditions: Iterable[str], endpoint: str = "accuracy") -> list[ArmScore]:
    """Per condition the mean over seeds with its interval, and every seed."""
    found = []
    for name in conditions:
        rows = [(run, values) for run in runs if (values := run.scores(name, endpoint))]
        if not rows:
            continue
        table = np.array([values for _, values in rows])
        interval, method = mean_interval(table, share=endpoint in SHARES)
        before = [_before_training(run, name, endpoint) for run, _ in rows]
        found.append(
            ArmScore(
                condition=name,
                endpoint=endpoint,
                unit="points" if endpoint in SHARES else "nats",
                mean=float(table.mean()),
                ci_low=interval.low,
                ci_high=interval.high,
                method=method,
                n=table.shape[1],
                per_seed=tuple(SeedValue(seed=r.seed, value=float(np.mean(row))) for r, row in rows if r.seed is not None),
                first=None if None in before else _mean(before),
            )
        )
    return found


def _before_training(run: Run, condition: str, endpoint: str) -> float | None:
    evaluations = run.of_kind("evaluation")
    if len(evaluations) < 2 or evaluations[0]["step"] != 0:
        return None
    return next((c.get(endpoint) for c in evaluations[0]["conditions"] if c["name"] == condition), None)


def mean_interval(table: Any, *, share: bool = True) -> tuple[Interval, str]:
    """95 % interval of the mean over seeds and problems, both of them samples; of one seed, over its problems."""
    (seeds, problems), mean = table.shape, float(table.mean())
    alike = share and np.ptp(table.mean(1)) == 0 == np.ptp(table - table[:1])
    if seeds > 1 and problems > 1 and not alike and (squares := MeanSquares.of(table)).variance > 0:
        half = math.sqrt(squares.variance) * float(stats.t.ppf(0.975, squares.freedom))
        low, high = (max(0.0, mean - half), min(1.0, mean + half)) if share else (mean - half, mean + half)
        return Interval(low, high), "t over seeds × problems, crossed"
    if share:
        return wilson(mean, problems), "Wilson, over problems"
    return over_problems(table.mean(0)), "t over problems"


def magnitudes(conditions: Mapping[str, str | None]) -> dict[str, float | None]:
    """The magnitude of each condition, clean being 0; None for all when their plans differ in anything else."""
    found: dict[str, float | None] = {}
    shapes = set()
    for name, text in conditions.items():
        clauses = () if text is None else Plan.parse(text).clauses
        fault = clauses[0].fault.model_dump() if len(clauses) == 1 else {}
        found[name] = 0.0 if text is None else fault.pop("magnitude", None)
        if text is not None:
            shapes.add(f"{fault} {clauses[0].site}" if len(clauses) == 1 else text)
    alike = len(shapes) == 1 and len(found) > 2 and None not in found.values()
    return found if alike else dict.fromkeys(conditions)


# ---- curves

Row = list[tuple[int, float]]
"""Steps and values of one run."""


def curves(runs: Sequence[Run], conditions: Iterable[str]) -> list[Curve]:
    """What was measured at every step, over the seeds."""
    measured: dict[str, list[Row]] = {
        name: [[(s["step"], s[field]) for s in run.of_kind("step") if s.get(field) is not None] for run in runs]
        for field, name in CURVES.items()
    }
    for condition in conditions:
        measured[f"accuracy, {condition}"] = [
            [(e["step"], c["accuracy"]) for e in run.of_kind("evaluation") for c in e["conditions"] if c["name"] == condition]
            for run in runs
        ]
    found = []
    for name, rows in measured.items():
        by_step: dict[int, list[float]] = {}
        for step, value in (pair for row in rows for pair in row):
            by_step.setdefault(step, []).append(value)
        if len(by_step) > 1:
            points = (CurvePoint(step=s, mean=_mean(v), low=min(v), high=max(v)) for s, v in sorted(by_step.items()))
            rough = _mean(roughness(row) for row in rows)
            found.append(Curve(name=name, points=tuple(points), roughness=rough))
    return found


def roughness(row: Row) -> float | None:
    """How far a point lies, on average, from the straight line between its two neighbours; None for fewer than five.

    A straight line has 0, and a slow bend nearly so. Independent noise of standard deviation s around either has 0.98 s
    where the steps are even.
    """
    steps, values = np.array(row, dtype=np.float64).reshape(-1, 2).T
    if len(steps) < 5 or (np.diff(steps) <= 0).any():
        return None
    part = (steps[1:-1] - steps[:-2]) / (steps[2:] - steps[:-2])
    between = values[:-2] + part * (values[2:] - values[:-2])
    return float(np.abs(values[1:-1] - between).mean())


def sigma_curve(runs: Sequence[Run]) -> list[Curve]:
    """σ over the steps of the first run, over the layers that have noise; none for an arm without AQN."""
    text, steps = (runs[0].config.get("aqn"), runs[0].config.get("steps")) if runs else (None, None)
    if text is None or steps is None:
        return []
    from shaketable.aqn.spec import AQN

    aqn = AQN.load(text)
    read = runs[0].last("mechanism")
    if read is not None and read["conditions"]:
        count = len(read["conditions"][0]["layers"])
    else:
        count = 1 + max((99, *aqn.multipliers, *(aqn.layers or ())))  # not known; σ needs edges and a middle
    groups = aqn.groups(count)
    rows = ([aqn.sigma(group, step, steps) for group in groups] for step in range(steps))
    points = tuple(CurvePoint(step=n, mean=_mean(row), low=min(row), high=max(row)) for n, row in enumerate(rows))
    return [Curve(name="σ of AQN", points=points)]


# ---- proof


def proof(runs: Sequence[Run]) -> list[Proof]:
    """That the faults were there: asked and measured, in training and in every score."""
    rows: list[Proof] = []
    ledgers = [(run, (run.last("finished") or {"ledgers": {}})["ledgers"]) for run in runs]
    for name, where in (("plan", "training: plan"), ("aqn", "training: AQN")):
        rows += _proofs(where, [found.get(name) for run, found in ledgers if run.config.get(name)])
    repaired = [(run.config.get("plans", ()), found) for run, found in ledgers if run.of_kind("rung")]
    for plan in dict.fromkeys(plan for plans, _ in repaired for plan in plans):
        rows += _proofs("hardening: plan", [found.get(plan) for plans, found in repaired if plan in plans], plan)
    names = dict.fromkeys(c["name"] for run in runs if (e := run.last("evaluation")) for c in e["conditions"])
    for name in names:
        scored = [c for run in runs if (c := run.condition(name)) is not None and c["plan"] is not None]
        rows += _proofs(f"scored: {name}", [c["ledger"] for c in scored], scored[0]["plan"] if scored else "")
    return rows


def _proofs(where: str, ledgers: Sequence[Event | None], plan: str = "") -> list[Proof]:
    """The proof of one plan in all runs; a run that should have a ledger and has none makes all of it `inert`.

    Where no run has one, `plan` is named as not proven; without it there is no row: a plan may be meant for scores alone.
    """
    rows = []
    for site in merged_sites(ledgers):
        asked, measured, changed = site["asked"], site["measured_magnitude"], site["changed_fraction"]
        both = asked is not None and measured is not None
        rows.append(
            Proof(
                where=where,
                fault=site["fault"],
                site=site["site"],
                asked=asked,
                measured=measured,
                error=site["measured_error"],
                changed=changed,
                survival=site["survival_rate"],
                forward=site["forward"],
                backward=site["backward"],
                verdict=("differs" if site["remark"] else "agrees") if both else "proven" if changed else "inert",
                remark=site["remark"],
            )
        )
    if all(ledger is not None for ledger in ledgers):
        return rows
    rows = rows or [Proof(where=where, fault=plan, forward=0, backward=0)] * bool(plan)
    remark = f"{sum(x is None for x in ledgers)} of {len(ledgers)} runs have no ledger of it"
    return [row.model_copy(update={"verdict": "inert", "remark": remark}) for row in rows]


# ---- mechanism, cost, examples


def mechanism(runs: Sequence[Run]) -> list[MechanismResult]:
    """Per condition and layer the mean over seeds, after the last step."""
    read = [e["conditions"] for r in runs if (e := r.last("mechanism")) is not None and e["conditions"]]
    readings = [name for name in LayerResult.model_fields if name != "layer"]
    found = []
    for i, first in enumerate(read[0] if read else ()):
        same = [conditions[i] for conditions in read]
        layers = [
            LayerResult(layer=at["layer"], **{name: _mean(c["layers"][n].get(name) for c in same) for name in readings})
            for n, at in enumerate(first["layers"])
        ]
        loss = _mean(c.get("loss") for c in same)
        found.append(MechanismResult(condition=first["condition"], loss=loss, layers=tuple(layers)))
    return found


def cost(runs: Sequence[Run]) -> Cost:
    steps = [s for r in runs for s in r.of_kind("step") if "seconds" in s]
    whole = sum(s["seconds"] for s in steps)
    shares = {
        f"{name}_share": sum(s.get(f"{name}_seconds", 0.0) for s in steps) / whole if whole else None
        for name in ("sampling", "injection", "aqn")
    }
    times = [c["seconds"] for r in runs for e in r.of_kind("evaluation") for c in e["conditions"]]
    return Cost(
        seconds_per_step=_mean(r.value("seconds_per_step") for r in runs),
        evaluation_seconds=sum(times) / len(runs) if runs else None,
        **shares,
    )


def samples(runs: Sequence[Run]) -> list[Sample]:
    """What the first run wrote to the first problems, under every condition."""
    for run in runs:
        examples, evaluation = run.last("examples"), run.last("evaluation")
        if examples is not None and evaluation is not None:
            known = {p["id"]: p for p in examples["problems"]}
            return [
                Sample(condition=c["name"], **known[a["id"]], text=a["text"], correct=a["correct"])
                for c in evaluation["conditions"]
                for a in c["answers"]
                if a["id"] in known
            ]
    return []


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None

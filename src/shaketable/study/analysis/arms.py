"""What an arm came to, from the records of its finished runs: scores, curves, σ, proof, mechanism, cost, examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from shaketable.evaluate.statistics import Interval, MeanSquares, wilson
from shaketable.evaluate.sweep.results import merged_sites
from shaketable.study.analysis.runs import Event, Run

CURVES = {
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "kl_sampler_trainer": "KL(sampler‖trainer)",
    "grad_norm": "gradient norm",
}
SHARES = ("accuracy", "formatted")
"""Endpoints that lie between 0 and 1 and are read in points; the loss is read in nats."""
BAND = "least to greatest over seeds"
READ = ("rms", "kurtosis", "zeros", "survival", "survival_inside", "grad_norm")


def scores(runs: Sequence[Run], conditions: Iterable[str], endpoint: str = "accuracy") -> list[dict[str, Any]]:
    """Per condition the mean over seeds with its interval, and every seed."""
    found = []
    for name in conditions:
        rows = [(r.seed, values, r) for r in runs if (values := r.scores(name, endpoint))]
        if not rows:
            continue
        table = np.array([row for _, row, _ in rows])
        interval, method = mean_interval(table) if endpoint in SHARES else plain_interval(table)
        first = [f for _, _, r in rows if (f := _first(r, name, endpoint)) is not None]
        found.append(
            {
                "condition": name,
                "endpoint": endpoint,
                "unit": "points" if endpoint in SHARES else "nats",
                "mean": float(table.mean()),
                "ci_low": interval.low,
                "ci_high": interval.high,
                "method": method,
                "n": table.shape[1],
                "per_seed": [{"seed": seed, "value": float(np.mean(row))} for seed, row, _ in rows],
                "first": _mean(first) if len(first) == len(rows) else None,
            }
        )
    return found


def mean_interval(table: Any, level: float = 0.95) -> tuple[Interval, str]:
    """Of the mean over seeds and problems, both of them samples; of one seed, over its problems."""
    seeds, problems = table.shape
    if seeds < 2 or problems < 2 or np.ptp(table.mean(1)) == 0 == np.ptp(table - table[:1]):
        return wilson(float(table.mean()), problems, level), "Wilson, over problems"
    squares = MeanSquares.of(table)
    if squares.variance == 0:
        return wilson(float(table.mean()), problems, level), "Wilson, over problems"
    half = math.sqrt(squares.variance) * float(stats.t.ppf((1 + level) / 2, squares.freedom))
    mean = float(table.mean())
    return Interval(max(0.0, mean - half), min(1.0, mean + half)), "t over seeds × problems, crossed"


def plain_interval(table: Any, level: float = 0.95) -> tuple[Interval, str]:
    """The same for numbers that are no shares."""
    seeds, problems = table.shape
    mean = float(table.mean())
    if seeds > 1 and problems > 1 and (squares := MeanSquares.of(table)).variance > 0:
        half = math.sqrt(squares.variance) * float(stats.t.ppf((1 + level) / 2, squares.freedom))
        return Interval(mean - half, mean + half), "t over seeds × problems, crossed"
    if problems < 2:
        return Interval(mean, mean), "one problem, no interval"
    half = float(stats.sem(table.mean(0))) * float(stats.t.ppf((1 + level) / 2, problems - 1))
    return Interval(mean - half, mean + half), "t over problems"


def _first(run: Run, condition: str, endpoint: str) -> float | None:
    """The score before training; None where there was none."""
    evaluations = run.of_kind("evaluation")
    if len(evaluations) < 2 or evaluations[0]["step"] != 0:
        return None
    return next((c.get(endpoint) for c in evaluations[0]["conditions"] if c["name"] == condition), None)


def curves(runs: Sequence[Run], conditions: Iterable[str]) -> list[dict[str, Any]]:
    """What was measured at every step, over the seeds."""
    found = []
    for field, name in CURVES.items():
        rows = [(s["step"], s.get(field)) for r in runs for s in r.of_kind("step")]
        found.append({"name": name, "points": _points(rows), "band": BAND})
    for condition in conditions:
        rows = [
            (e["step"], c["accuracy"])
            for r in runs
            for e in r.of_kind("evaluation")
            for c in e["conditions"]
            if c["name"] == condition
        ]
        found.append({"name": f"accuracy, {condition}", "points": _points(rows), "band": BAND})
    return [curve for curve in found if len(curve["points"]) > 1]


def _points(rows: Iterable[tuple[int, float | None]]) -> list[dict[str, float]]:
    by_step: dict[int, list[float]] = {}
    for step, value in rows:
        if value is not None:
            by_step.setdefault(step, []).append(value)
    return [{"step": s, "mean": _mean(v), "low": min(v), "high": max(v)} for s, v in sorted(by_step.items())]


def sigmas(run: Run) -> list[dict[str, Any]]:
    """σ over the steps, for each group of layers that share it."""
    text, steps = run.config.get("aqn"), run.config.get("steps")
    if text is None or steps is None:
        return []
    from shaketable.aqn.spec import AQN

    aqn = AQN.load(text)
    read = run.last("mechanism")
    count = len(read["conditions"][0]["layers"]) if read is not None and read["conditions"] else None
    return [
        {"label": group.label, "points": [[s, aqn.sigma(group, s, steps)] for s in range(steps)]} for group in aqn.groups(count)
    ]


def proof(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """That the faults were there: asked and measured, in training and in every score."""
    rows = []
    for name, where in (("plan", "training: plan"), ("aqn", "training: AQN")):
        asked = [r for r in runs if r.config.get(name)]
        ledgers = [(r.last("finished") or {"ledgers": {}})["ledgers"].get(name) for r in asked]
        rows += _rows(where, ledgers)
    for plan in dict.fromkeys(p for r in runs for p in _hardened_against(r)):
        rows += _rows("hardening: plan", [_hardened_against(r)[plan] for r in runs if plan in _hardened_against(r)], plan)
    names = dict.fromkeys(c["name"] for r in runs if (e := r.last("evaluation")) for c in e["conditions"])
    for name in names:
        scored = [c for r in runs if (c := r.condition(name)) is not None and c["plan"] is not None]
        rows += _rows(f"scored: {name}", [c["ledger"] for c in scored], scored[0]["plan"] if scored else "")
    return rows


def _hardened_against(run: Run) -> dict[str, Event | None]:
    """The ledgers of the plans that a model was repaired under, by plan; a ladder of no rungs meets none."""
    if not run.of_kind("rung"):
        return {}
    ledgers = (run.last("finished") or {"ledgers": {}})["ledgers"]
    return {plan: ledgers.get(plan) for plan in run.config.get("plans", ())}


def _rows(where: str, ledgers: Sequence[Event | None], plan: str = "") -> list[dict[str, Any]]:
    """The proof of one plan in all runs; a run that should have a ledger and has none proves nothing for all.

    Where none of them has one, `plan` is what is not proven; without it nothing is told: a plan may be meant for scores alone.
    """
    rows = [_proof(where, site) for site in merged_sites(ledgers)]
    if all(ledger is not None for ledger in ledgers):
        return rows
    rows = rows or [_proof(where, _NOTHING | {"fault": plan})] * bool(plan)
    remark = f"{sum(x is None for x in ledgers)} of {len(ledgers)} runs have no ledger of it"
    return [row | {"verdict": "inert", "remark": remark} for row in rows]


_NOTHING: Event = dict.fromkeys(
    ("asked", "measured_magnitude", "measured_error", "changed_fraction", "survival_rate", "remark")
)
_NOTHING |= {"site": "", "forward": 0, "backward": 0}
"""A place of which no run has a ledger."""


def _proof(where: str, site: Event) -> dict[str, Any]:
    asked, measured, changed = site["asked"], site["measured_magnitude"], site["changed_fraction"]
    both = asked is not None and measured is not None
    verdict = ("differs" if site["remark"] else "agrees") if both else "proven" if changed else "inert"
    return {
        "where": where,
        "fault": site["fault"],
        "site": site["site"],
        "asked": asked,
        "measured": measured,
        "error": site["measured_error"],
        "changed": changed,
        "survival": site["survival_rate"],
        "forward": site["forward"],
        "backward": site["backward"],
        "verdict": verdict,
        "remark": site["remark"],
    }


def mechanism(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per condition and layer the mean over seeds, after the last step."""
    read = [e["conditions"] for r in runs if (e := r.last("mechanism")) is not None and e["conditions"]]
    found = []
    for i, first in enumerate(read[0] if read else ()):
        same = [conditions[i] for conditions in read]
        layers = [
            {"layer": at["layer"], **{name: _mean([c["layers"][n].get(name) for c in same]) for name in READ}}
            for n, at in enumerate(first["layers"])
        ]
        found.append({"condition": first["condition"], "loss": _mean([c.get("loss") for c in same]), "layers": layers})
    return found


def cost(runs: Sequence[Run]) -> dict[str, Any]:
    """Seconds per step, and where they go."""
    steps = [s for r in runs for s in r.of_kind("step") if "seconds" in s]
    whole = sum(s["seconds"] for s in steps)
    shares = {name: sum(s.get(f"{name}_seconds", 0.0) for s in steps) / whole if whole else None for name in _SHARES}
    times = [c["seconds"] for r in runs for e in r.of_kind("evaluation") for c in e["conditions"]]
    return {
        "seconds_per_step": _mean([r.value("seconds_per_step") for r in runs]),
        **{f"{name}_share": share for name, share in shares.items()},
        "evaluation_seconds": sum(times) / len(runs) if runs else None,
    }


_SHARES = ("sampling", "injection", "aqn")


def samples(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What the first run wrote to the first problems, under every condition."""
    run = next((r for r in runs if r.last("examples") and r.last("evaluation")), None)
    if run is None:
        return []
    examples, evaluation = run.last("examples"), run.last("evaluation")
    assert examples is not None
    assert evaluation is not None
    known = {p["id"]: p for p in examples["problems"]}
    return [
        {"condition": c["name"], **known[a["id"]], "text": a["text"], "correct": a["correct"]}
        for c in evaluation["conditions"]
        for a in c["answers"]
        if a["id"] in known
    ]


def _mean(values: Iterable[float | None]) -> Any:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None

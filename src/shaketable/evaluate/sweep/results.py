"""A sweep's results, computed from its record alone: points, paired differences to the clean model, and the figure.

A problem counts once, by its mean over noise seeds. Accuracy has Wilson's interval; the difference to clean has the t
interval and p of `paired`, and the exact McNemar p of each seed. Holm's correction runs over all
faulty points of all models. Of texts the unit is the text, and the interval of its share of foreseen tokens is Student's t
over texts.

A point appears when all its seeds and its clean point are recorded; `complete` says whether all are.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaketable.evaluate.statistics import Comparison, corrected, mcnemar, mean_interval, paired, wilson
from shaketable.evaluate.sweep.config import SweepConfig, depends_on_seed
from shaketable.records.record import RunRecord

SCHEMA = "shaketable.sweep/1"
Event = dict[str, Any]
MEASURED = ("measured_error", "measured_magnitude", "changed_fraction", "survival_rate")


REFERENCE: dict[str, Any] = {
    **dict.fromkeys(("difference", "difference_low", "difference_high", "kl"), 0.0),
    "p": 1.0,
    "p_adjusted": None,
    "mcnemar_per_seed": [],
    "method": None,
    "detectable": None,
    "distinguishable": False,
    "sentence": "the reference",
    "agreement": 1.0,
}
"""What the clean point has: it is no different from itself."""


@dataclass(frozen=True)
class Point:
    """One model under one plan at one magnitude: the runs of all seeds, and the clean run it is compared with."""

    model: str
    name: str
    magnitude: float | None
    runs: list[Event]
    clean: Event

    @property
    def is_clean(self) -> bool:
        return self.magnitude == 0

    @property
    def reads(self) -> bool:
        """Whether texts were read; else problems were solved."""
        return "texts" in self.clean

    @property
    def scores(self) -> NDArray[np.float64]:
        """Problems × seeds."""
        return np.array([_scores(run) for run in self.runs]).T


def results(record: RunRecord) -> dict[str, Any]:
    """Everything that a sweep's record says, for tables, plots and `--json`."""
    config = SweepConfig.checked(**record.config)
    found = _points(config, record.events("point"))
    faulty = [p for p in found if not p.is_clean]
    each = [paired(_scores(p.clean), p.scores, seed=config.seed) for p in faulty]
    compared = dict(zip(map(id, faulty), corrected(each), strict=True))
    points = [{**_facts(p), **(REFERENCE if p.is_clean else _compared(p, compared[id(p)]))} for p in found]
    wanted = len(config.models) * sum(s.is_first for s in config.settings())
    return {
        "schema": SCHEMA,
        "id": record.head["id"],
        "folder": str(record.folder),
        "started": record.head["started"],
        "complete": len(points) == wanted,
        "config": config.model_dump(mode="json"),
        "environment": record.head["environment"],
        "models": [{k: v for k, v in e.items() if k not in ("event", "time")} for e in record.events("model")],
        "notes": _notes(config, points),
        "points": points,
    }


def _points(config: SweepConfig, events: Sequence[Event]) -> list[Point]:
    runs = {(e["model"], e.get("plan_index", 0), e["magnitude"], e["seed"]): e for e in reversed(events)}
    settings, found = config.settings(), []
    for model in config.models:
        clean = runs.get((model, 0, 0.0, config.seed))
        for first in (s for s in settings if s.is_first):
            seeds = [s.seed for s in settings if (s.plan_index, s.magnitude) == (first.plan_index, first.magnitude)]
            mine = [runs.get((model, first.plan_index, first.magnitude, seed)) for seed in seeds]
            whole = [run for run in mine if run is not None]
            if clean is not None and len(whole) == len(mine):
                found.append(Point(model, first.name, first.magnitude, whole, clean))
    return found


def _scores(run: Event) -> list[float]:
    if "texts" in run:
        return [t["correct"] / t["tokens"] for t in run["texts"]]
    return [float(a["correct"]) for a in run["answers"]]


def _compared(point: Point, found: Comparison) -> dict[str, Any]:
    clean = _scores(point.clean)
    return {
        "difference": found.difference,
        "difference_low": found.interval.low,
        "difference_high": found.interval.high,
        "p": found.p,
        "p_adjusted": found.adjusted,
        "mcnemar_per_seed": [] if point.reads else [mcnemar(clean, _scores(run)) for run in point.runs],
        "method": found.method,
        "detectable": found.detectable,
        "distinguishable": found.distinguishable,
        "sentence": found.sentence().replace("problem", "text") if point.reads else found.sentence(),
        **(_distance_of_texts(point) if point.reads else {key: point.runs[0]["drift"][key] for key in ("kl", "agreement")}),
    }


def _facts(point: Point) -> dict[str, Any]:
    """What needs no comparison."""
    scores, runs = point.scores, point.runs
    accuracy = float(scores.mean())
    seconds, tokens = (sum(float(run[name]) for run in runs) for name in ("seconds", "tokens"))
    spread = point.reads and np.ptp(scores.mean(1)) > 0
    interval = mean_interval(scores.mean(1)) if spread else wilson(accuracy, len(scores))
    sites = merged_sites([run["ledger"] for run in runs])
    return {
        "model": point.model,
        "name": point.name,
        "magnitude": point.magnitude,
        "plan": runs[0]["plan"],
        "accuracy": accuracy,
        "ci_low": max(interval.low, 0.0),
        "ci_high": min(interval.high, 1.0),
        "n": len(scores),
        "seeds": [run["seed"] for run in runs],
        "accuracy_per_seed": scores.mean(0).tolist(),
        **(_losses(point) if point.reads else {"formatted": _mean([run["formatted"] for run in runs])}),
        "injections": sum(s["forward"] + s["backward"] for s in sites),
        "measured_error": max((s["measured_error"] or 0.0 for s in sites), default=0.0),
        "ledger": sites,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "batch_size": runs[0]["batch_size"],
    }


def _losses(point: Point) -> dict[str, Any]:
    """Loss per token over all texts and seeds, and its exponential; None where a fault made it no number."""
    rows, cut = [t for run in point.runs for t in run["texts"]], {"cut": point.clean["cut"]}
    if any(t["loss"] is None for t in rows):
        return {"loss": None, "perplexity": None, **cut}
    loss = sum(t["loss"] for t in rows) / sum(t["tokens"] for t in rows)
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else None, **cut}


def _distance_of_texts(point: Point) -> dict[str, Any]:
    """KL and agreement over all tokens; the difference of losses with its interval over texts."""
    rows = [t for run in point.runs for t in run["texts"]]
    tokens = sum(t["tokens"] for t in rows)
    off = _text_losses(point.runs) - _text_losses([point.clean])
    interval = mean_interval(off) if np.isfinite(off).all() else None
    return {
        "kl": None if any(t["kl"] is None for t in rows) else sum(t["kl"] for t in rows) / tokens,
        "agreement": sum(t["agree"] for t in rows) / tokens,
        "loss_difference": interval and float(off.mean()),
        "loss_difference_low": interval and interval.low,
        "loss_difference_high": interval and interval.high,
    }


def _text_losses(runs: list[Event]) -> NDArray[np.float64]:
    """Per text its loss per token, over the seeds."""
    each = [[math.nan if t["loss"] is None else t["loss"] / t["tokens"] for t in run["texts"]] for run in runs]
    return np.asarray(np.mean(each, axis=0))


def merged_sites(ledgers: Sequence[Event | None]) -> list[dict[str, Any]]:
    """What happened at each clause of one plan: fires of all ledgers together, measurements as their mean."""
    known = [ledger for ledger in ledgers if ledger is not None]
    return [_site(sites) for sites in zip(*(ledger["sites"] for ledger in known), strict=True)]


def _site(sites: Sequence[dict[str, Any]]) -> dict[str, Any]:
    same = {name: sites[0][name] for name in ("site", "fault", "asked", "matched")}
    sums = {name: sum(s[name] for s in sites) for name in ("forward", "backward", "fused")}
    means = {name: _mean([s.get(name) for s in sites]) for name in MEASURED}
    return {**same, **sums, **means, "remark": next((s["remark"] for s in sites if s["remark"]), None)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _notes(config: SweepConfig, points: list[dict[str, Any]]) -> list[str]:
    found = []
    steady = [s for s in config.settings() if s.plan is not None and not depends_on_seed(s.plan)]
    if steady and config.seeds > 1:
        which = "" if len(config.plan) == 1 else f" ({', '.join(s.name for s in steady)})"
        found.append(f"the fault is deterministic{which}: every seed gives the same numbers, so it ran with one")
    for point in points:
        if point["magnitude"] == 0 and point.get("cut"):
            found.append(f"{point['model']}: {point['cut']} of {point['n']} texts exceed its context; their beginning was read")
    lost = [p for p in points if p["kl"] is None and config.engine == "hf"]
    found += [f"{p['model']} at {p['plan']}: KL is not finite, the logits are not numbers" for p in lost]
    if config.engine == "vllm":
        found.append("computed by vLLM, which returns no full distributions: there is no KL")
    for point in points:
        found += [f"{point['model']}, {s['fault']}@{s['site']}: {s['remark']}" for s in point["ledger"] if s["remark"]]
    return found


# ---- the figure


def plot(results: dict[str, Any], path: str | Path) -> None:
    """Draw what `results` gave into a PNG: the score with intervals over the points, one line per model, and the KL below.

    Points stand at equal distances and are named, since magnitudes span decades and 0 has no place on a logarithm. The score is
    accuracy, or of texts the loss. The clean score goes through as a dotted line.
    """
    from matplotlib.figure import Figure

    points, config = results["points"], results["config"]
    names, models = (list(dict.fromkeys(p[key] for p in points)) for key in ("name", "model"))
    reads, has_kl, several = "loss" in points[0], any(p["kl"] for p in points), isinstance(config["plan"], list)
    figure = Figure(figsize=(max(6.4, 2.2 + 0.9 * len(names)), 6.4 if has_kl else 4.2), layout="constrained")
    axes, *below = figure.subplots(1 + has_kl, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + has_kl])[:, 0]
    look: dict[str, Any] = {"marker": "o", "linestyle": "none" if several else "-"}
    for i, (model, name) in enumerate(zip(models, short_names(models), strict=True)):
        mine = [p for p in points if p["model"] == model]
        x = [names.index(p["name"]) + 0.09 * (i - (len(models) - 1) / 2) for p in mine]  # apart, so that bars show
        y = [math.nan if reads and p["loss"] is None else p["loss" if reads else "accuracy"] for p in mine]
        bars = [[max(0.0, p["accuracy"] - p["ci_low"]) for p in mine], [max(0.0, p["ci_high"] - p["accuracy"]) for p in mine]]
        drawn = axes.errorbar(x, y, yerr=None if reads else bars, label=name, capsize=3.5, **look)
        axes.axhline(y[0], color=drawn[0].get_color(), linestyle=":", linewidth=1.2)
        for panel in below:
            panel.semilogy(x, [p["kl"] or math.nan for p in mine], color=drawn[0].get_color(), **look)
            panel.set_ylabel("KL to clean, nats per token")
    axes.set_ylabel("loss, nats per token" if reads else "accuracy")
    if not reads:  # from 0: a fall looks as deep as it is
        axes.set_ylim(0.0, min(1.05, max(0.01, 1.12 * max(p["ci_high"] for p in points))))
    plan, runs = f"{len(config['plan'])} plans" if several else config["plan"], max(len(p["seeds"]) for p in points)
    sample = f"{config['task']}, {points[0]['n']} {'texts' if reads else 'problems'}, {runs} noise seed{'s' * (runs > 1)}"
    axes.set_title(f"{textwrap.fill(plan, 70, break_on_hyphens=False)}\n{sample}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    last = below[-1] if below else axes
    last.set_xticks(range(len(names)), [n.replace("@", "\n@") for n in names], fontsize=8 if several else 10)
    last.set_xlabel("plan" if several else "magnitude (not to scale)")
    for panel in (axes, *below):
        panel.grid(axis="y", alpha=0.4)
    figure.savefig(path, dpi=150, format="png")


def short_names(models: list[str]) -> list[str]:
    """Last parts of paths, where these tell the models apart."""
    names = [m.rstrip("/").rpartition("/")[2] for m in models]
    return names if len(set(names)) == len(names) else list(models)

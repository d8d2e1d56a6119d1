"""The page of a study: one HTML file that says first what was shown, and then everything a reader needs to doubt it.

The page is made from the findings and from nothing else, so it can be drawn again on any machine; no torch is imported. It
loads nothing: style, script and drawings are inline, and a content policy in its head forbids the browser to fetch. With
JavaScript off only sorting, the theme button, hiding arms and the readout of single cells are lost.

The order is that of a careful reader, not that of the work: the verdict with its interval; what was asked before the
run; scores with every seed; all comparisons, not the good ones; then curves, the diagnosis, the proof that the faults were
there, and the way to the records. A section without data is left out, except where its absence is itself a finding (no
comparison, no proof). A plotting library was rejected for the reasons given in `locate.page`, whose look this page shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from shaketable.locate.diagnosis import PROBES
from shaketable.report.locate_html import MARKS, STATUS_OF, number
from shaketable.report.svg.curves import Drawing, Line, curves
from shaketable.report.svg.forest import axis_of, families, forest_axis, forest_row, told
from shaketable.report.svg.heatmap import HeatmapRow, Shading, bar_row, layer_axis, status_row, value_row
from shaketable.report.svg.proof import MEANING, proof_rows
from shaketable.report.svg.robustness import robustness
from shaketable.report.svg.scale import amount, finite, known, signed
from shaketable.report.svg.schedule import schedule
from shaketable.report.svg.seeds import scale_of, seed_strip
from shaketable.report.svg.style import COLORS, swatch
from shaketable.report.wording import (
    METHOD,
    badge,
    chance,
    counted,
    duration,
    excerpt_length,
    fact,
    methods_of,
    missing_runs,
    named,
    percent,
    place,
    proof_summary,
    share_of,
    strength_unit,
    unit_of,
)
from shaketable.study.analysis.report_data import complete

READINGS = {
    "grad_norm": "norm of the gradient of the layer's parameters",
    "survival": "share of values that the plan did not turn into zero",
    "survival_inside": "the same for what the plan hit inside of the layer",
    "zeros": "share of values that are exactly zero",
    "rms": "root mean square of the layer's output",
    "kurtosis": "excess kurtosis of the layer's output",
}
UNFOLDED = 60
"""Rows of proof that are shown at once."""
CELLS = 12_000
"""Of the heat maps of the mechanism, give or take."""
SAMPLES = 240
"""Answers on a page, give or take."""
STATUSES = {"done": "pass", "running": "inconclusive", "partial": "suspect", "missing": "suspect"}
Findings = dict[str, Any]
Proof = tuple[Findings, list[Findings]]


def page(findings: Findings) -> str:
    """The self-contained HTML page of a study, or of a single run."""
    f = complete(findings)
    numbers = {arm["name"]: i for i, arm in reversed(list(enumerate(f["arms"])))}
    answers = samples(f["arms"])
    shown = shown_samples(answers)
    readings, drawn = mechanisms(f), shown_mechanisms(f["arms"])
    shown_proof, folded_proof = proof_tables(f["arms"])
    unit = strength_unit(f["robustness"])
    return _template().render(
        f=f,
        s=f["study"],
        arms=f["arms"],
        of_arm=numbers,
        colors=COLORS,
        swatch=swatch,
        badge=badge(f),
        missing=missing_runs(f["runs"]),
        counts=Counter(run["status"] for run in f["runs"]),
        statuses=STATUSES,
        marks=MARKS,
        verdicts=STATUS_OF,
        told=told,
        proof=proof_summary(f["arms"]),
        proven=shown_proof,
        folded_proof=folded_proof,
        meaning=MEANING,
        tables=score_tables(f["arms"], [c["name"] for c in f["study"]["conditions"]]),
        claim=claim(f["comparisons"]),
        came_back=came_back(f["recovered"]),
        share_of=share_of,
        forests=forests(f["comparisons"]),
        curves=learning_curves(f["arms"]),
        robust=robustness([(numbers[r["arm"]], r["arm"], r["points"]) for r in f["robustness"] if r["arm"] in numbers], unit),
        diagnoses=[(d, diagnosis_rows(d), layer_axis(*_blamed(d))) for d in f["diagnoses"]],
        schedules=[(i, svg) for i, arm in enumerate(f["arms"]) if (svg := schedule(i, arm["name"], arm["sigma"]))],
        mechanisms=readings[:drawn],
        left_out=[m["condition"] for m in readings[drawn:]],
        strengths=strength_table(f["robustness"], unit),
        named=named(f),
        methods_of=methods_of,
        place=place,
        costs=_costs(f["arms"]),
        samples=answers,
        per_condition=shown,
        excerpt=excerpt_length(min(len(items), shown) for _, _, groups in answers for items in groups.values()),
        method=METHOD,
    )


@cache
def _template() -> Template:
    """Compiled once: a store of studies is reported in one go."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = {"number": number, "signed": signed, "amount": amount, "chance": chance, "percent": percent}
    environment.filters |= filters | {"duration": duration, "link": link, "raw": raw, "fact": fact, "counted": counted}
    return environment.get_template("study.html.jinja")


def link(folder: str) -> str:
    """A relative folder as an address; empty for anything that could lead elsewhere."""
    outside = not folder or folder.startswith(("/", "\\")) or ":" in folder.split("/")[0]
    return "" if outside else quote(folder, safe="/-._~")


def raw(value: Any) -> str:
    """A number for the script that sorts; empty when there is none."""
    return f"{value:.6g}" if finite(value) else ""


def proof_tables(arms: Sequence[Findings]) -> tuple[list[Proof], list[Proof]]:
    """Per arm the rows to show and those to fold: what was scored as planned, when there is a lot of it."""
    rows = [(arm, proof_rows(arm["proof"])) for arm in arms]
    many = sum(len(found) for _, found in rows) > UNFOLDED
    folded = [(arm, [row for row in found if many and _expected(row)]) for arm, found in rows]
    shown = [(arm, [row for row in found if not (many and _expected(row))]) for arm, found in rows]
    return shown, [(arm, found) for arm, found in folded if found]


def _expected(row: Findings) -> bool:
    return bool(row["state"] == "pass" and str(row["where"]).startswith("scored"))


def score_tables(arms: Sequence[Findings], order: Sequence[str]) -> list[Findings]:
    """A table per endpoint: arms × conditions, in the order of the study; one scale for all cells."""
    found: dict[tuple[str, str], dict[str, dict[str, Findings]]] = {}
    for arm in arms:
        for score in arm["scores"]:
            found.setdefault((score["endpoint"], score["unit"]), {}).setdefault(arm["name"], {})[score["condition"]] = score
    return [_table(endpoint, unit, rows, order) for (endpoint, unit), rows in found.items()]


def _table(endpoint: str, unit: str, rows: dict[str, dict[str, Findings]], order: Sequence[str]) -> Findings:
    used = dict.fromkeys([*order, *(name for row in rows.values() for name in row)])
    scores = [score for row in rows.values() for score in row.values()]
    x = scale_of(scores)
    return {
        "endpoint": endpoint,
        "unit": unit,
        "conditions": [name for name in used if any(name in row for row in rows.values())],
        "rows": rows,
        "ends": [amount(end, unit) for end in (x.low, x.high)] if known(s["mean"] for s in scores) else [],
        "strip": lambda score, arm: seed_strip(score, arm, x),
    }


def forests(comparisons: Sequence[Findings]) -> list[Findings]:
    """A forest per unit, each with its axis."""
    made = []
    for name, members in families(comparisons):
        x = axis_of(members)
        rows = [(c, forest_row(c, x)) for c in members]
        made.append({"name": name, "rows": rows, "axis": forest_axis(x, members[0]["unit"])})
    return made


def came_back(recovered: Sequence[Findings]) -> Findings:
    """The share of the loss that each arm returned, as a forest."""
    rows = [(r, _as_comparison(r)) for r in recovered if finite(r["share"])]
    x = axis_of([c for _, c in rows])
    return {"rows": [(r, forest_row(c, x)) for r, c in rows], "axis": forest_axis(x, "%")}


def _as_comparison(r: Findings) -> Findings:
    low, high = (r["interval"][end] if finite(r["interval"][end]) else None for end in ("low", "high"))
    verdict = "shown" if low is not None and low > 0 else "not shown"
    ends = {"difference": r["share"], "ci_low": low, "ci_high": high, "verdict": verdict}
    return {**ends, "scale": 100, "unit": "%", "detectable": None, "per_seed": [], "primary": False}


def claim(comparisons: Sequence[Findings]) -> Findings | None:
    """The primary comparison on an axis of its own."""
    main = next((c for c in comparisons if c["primary"]), None)
    if main is None or not finite(main["difference"]):
        return None
    x = axis_of([main])
    return {"c": main, "svg": forest_row(main, x), "axis": forest_axis(x, main["unit"])}


def learning_curves(arms: Sequence[Findings]) -> list[tuple[str, str, Drawing]]:
    """A figure per curve, in order of appearance: its name, what its band is, and the drawing."""
    found: dict[str, list[Line]] = {}
    bands: dict[str, str] = {}
    for i, arm in enumerate(arms):
        for curve in arm["curves"]:
            found.setdefault(curve["name"], []).append(Line(i, arm["name"], curve["points"]))
            bands.setdefault(curve["name"], curve["band"])
    drawable = {n: lines for n, lines in found.items() if known(p["mean"] for line in lines for p in line.points)}
    return [(name, bands[name], curves(name, lines, unit_of(name))) for name, lines in drawable.items()]


def diagnosis_rows(d: Findings) -> list[HeatmapRow]:
    """Probes, statistics and the σ made of them, each a row over the layers."""
    layers = [row["layer"] for row in d["layers"]]
    seen = {probe for row in d["layers"] for probe in row["results"]}
    probes = [*(p for p in PROBES if p in seen), *sorted(seen.difference(PROBES))]
    rows = [status_row(p, layers, [row["results"].get(p) for row in d["layers"]]) for p in probes]
    for name in dict.fromkeys(key for row in d["layers"] for key in row["statistics"]):
        values = [row["statistics"].get(name) for row in d["layers"]]
        rows.append(value_row(name, layers, values, Shading.of(values)))
    given = {s["layer"]: s for s in d["sigmas"]}
    if given and layers:
        words = [given[n]["label"] if n in given else "" for n in layers]
        rows.append(bar_row("σ", layers, [given[n]["sigma"] if n in given else None for n in layers], words))
    return rows


def _blamed(d: Findings) -> tuple[list[int], list[int]]:
    return [row["layer"] for row in d["layers"]], [d["layer"]] if d["layer"] is not None else []


def strength_table(robustness: Sequence[Findings], unit: str) -> Findings:
    """The numbers of the robustness curves: arms × conditions; an arm that lacks a condition has a dash there."""
    heads = {p["condition"] or p["label"]: p["label"] or number(p["x"]) for r in robustness for p in r["points"]}
    means = [(r["arm"], {p["condition"] or p["label"]: amount(p["mean"], unit) for p in r["points"]}) for r in robustness]
    return {"heads": list(heads.values()), "rows": [(arm, [row.get(key, "–") for key in heads]) for arm, row in means]}


def mechanisms(f: Findings) -> list[Findings]:
    """Per condition: the loss of each arm and a panel per reading, arms × layers; the first and the primary one lead."""
    marked = sorted({d["layer"] for d in f["diagnoses"] if d["layer"] is not None})
    conditions = list(dict.fromkeys(m["condition"] for arm in f["arms"] for m in arm["mechanism"]))
    primary = (f["study"]["primary"] or {}).get("condition")
    order = dict.fromkeys([*conditions[:1], *(c for c in conditions if c == primary), *conditions])
    shadings = {name: Shading.of(_every(f["arms"], name)) for name in READINGS}
    return [_mechanism(condition, f["arms"], marked, shadings) for condition in order]


def _every(arms: Sequence[Findings], reading: str) -> list[Any]:
    return [row[reading] for arm in arms for m in arm["mechanism"] for row in m["layers"]]


def shown_mechanisms(arms: Sequence[Findings]) -> int:
    """How many conditions are drawn: all, unless arms and layers are so many that the page would grow beyond reason."""
    cells = sum(max((len(m["layers"]) for m in arm["mechanism"]), default=0) for arm in arms) * len(READINGS)
    return max(2, CELLS // max(cells, 1))


def _mechanism(condition: str, arms: Sequence[Findings], marked: Sequence[int], shadings: dict[str, Shading]) -> Findings:
    read = [(i, arm["name"], m) for i, arm in enumerate(arms) for m in arm["mechanism"] if m["condition"] == condition]
    layers = sorted({row["layer"] for _, _, m in read for row in m["layers"]})
    seen = {name: known(row[name] for _, _, m in read for row in m["layers"]) for name in READINGS}
    flat = [name for name, values in seen.items() if values and min(values) == max(values)]
    varied = [name for name, values in seen.items() if values and name not in flat]
    return {
        "condition": condition,
        "losses": [(i, name, m["loss"]) for i, name, m in read if finite(m["loss"])],
        "constant": [(name, READINGS[name], seen[name][0]) for name in flat],
        "panels": [_panel(name, read, layers, shadings[name]) for name in varied],
        "axis": layer_axis(layers, marked),
    }


def _panel(name: str, read: Sequence[tuple[int, str, Findings]], layers: Sequence[int], shading: Shading) -> Findings:
    table = [(i, arm, {row["layer"]: row[name] for row in m["layers"]}) for i, arm, m in read]
    rows = [(i, value_row(arm, layers, [row.get(n) for n in layers], shading)) for i, arm, row in table]
    return {"name": name, "meaning": READINGS[name], "rows": rows, "shading": shading}


def _costs(arms: Sequence[Findings]) -> Findings:
    """Arms with any cost, and the largest of each, to which the bars are drawn."""
    there = [(i, arm["name"], arm["cost"]) for i, arm in enumerate(arms) if known(arm["cost"].values())]
    largest = {key: max(known(c[key] for _, _, c in there), default=0.0) or 1.0 for key in (there[0][2] if there else ())}
    return {"rows": there, "largest": largest}


def samples(arms: Sequence[Findings]) -> list[tuple[int, str, dict[str, list[Findings]]]]:
    """Answers by arm and condition."""
    made = []
    for i, arm in enumerate(arms):
        groups: dict[str, list[Findings]] = {}
        for sample in arm["samples"]:
            groups.setdefault(sample["condition"], []).append(sample)
        if groups:
            made.append((i, arm["name"], groups))
    return made


def shown_samples(made: Sequence[tuple[int, str, dict[str, list[Findings]]]]) -> int:
    """How many answers of an arm under a condition are shown: six, or fewer where there are many arms and conditions."""
    return max(1, min(6, SAMPLES // max(sum(len(groups) for _, _, groups in made), 1)))

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from shaketable.report.figures import COLORS, Drawing, Line, curves, robustness, schedule, swatch
from shaketable.report.strips import (
    MEANING,
    HeatmapRow,
    ProofRow,
    Shading,
    axis_of,
    bar_row,
    families,
    forest_axis,
    forest_row,
    layer_axis,
    proof_rows,
    scale_of,
    seed_strip,
    status_row,
    told,
    value_row,
)
from shaketable.report.wording import (
    MARKS,
    METHOD,
    PROBES,
    STATUS_OF,
    amount,
    badge,
    chance,
    counted,
    difference_at,
    duration,
    excerpt_length,
    fact,
    finite,
    known,
    methods_of,
    missing_runs,
    named,
    number,
    percent,
    place,
    proof_summary,
    share_of,
    signed,
    strength_unit,
    unit_of,
)
from shaketable.study.analysis.results import (
    SCHEMA,
    ArmResult,
    ArmScore,
    ComparisonResult,
    DiagnosisResult,
    Findings,
    MechanismResult,
    RecoveredResult,
    Robustness,
    Sample,
    StepComparison,
)

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
ProofTable = tuple[ArmResult, list[ProofRow]]
Answers = tuple[int, str, dict[str, list[Sample]]]
Read = tuple[int, str, MechanismResult]
"""Number and name of an arm, and what was read in it."""


def page(findings: Findings) -> str:
    """The self-contained HTML page of a study, or of a single run."""
    f = findings.visible()
    numbers = {arm.name: i for i, arm in reversed(list(enumerate(f.arms)))}
    answers = samples(f.arms)
    shown = shown_samples(answers)
    readings, drawn = mechanisms(f), shown_mechanisms(f.arms)
    shown_proof, folded_proof = proof_tables(f.arms)
    unit = strength_unit(f.robustness)
    return _template().render(
        f=f,
        s=f.study,
        arms=f.arms,
        of_arm=numbers,
        colors=COLORS,
        swatch=swatch,
        badge=badge(f),
        missing=missing_runs(f.runs),
        counts=Counter(run.status for run in f.runs),
        statuses=STATUSES,
        marks=MARKS,
        verdicts=STATUS_OF,
        told=told,
        proof=proof_summary(f.arms),
        proven=shown_proof,
        folded_proof=folded_proof,
        meaning=MEANING,
        tables=score_tables(f.arms, [c.name for c in f.study.conditions]),
        claim=claim(f.comparisons),
        came_back=came_back(f.recovered),
        share_of=share_of,
        forests=forests(f.comparisons),
        curves=learning_curves(f.arms),
        roughness=roughness_table(f.arms),
        step_tables=step_tables(f.at_steps),
        robust=robustness([(numbers[r.arm], r.arm, r.points) for r in f.robustness if r.arm in numbers], unit),
        diagnoses=[(d, diagnosis_rows(d), _axis_of(d)) for d in f.diagnoses],
        schedules=[(i, svg) for i, arm in enumerate(f.arms) if (svg := schedule(i, arm.name, arm.sigma))],
        mechanisms=readings[:drawn],
        left_out=[m.condition for m in readings[drawn:]],
        strengths=strength_table(f.robustness, unit),
        named=named(f),
        methods_of=methods_of,
        place=place,
        costs=[(i, arm.name, arm.cost) for i, arm in enumerate(f.arms) if arm.cost.is_known],
        largest=lambda key: max(known(getattr(arm.cost, key) for arm in f.arms), default=0.0) or 1.0,
        samples=answers,
        per_condition=shown,
        excerpt=excerpt_length(min(len(items), shown) for _, _, groups in answers for items in groups.values()),
        method=METHOD,
        schema=SCHEMA,
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


def proof_tables(arms: Sequence[ArmResult]) -> tuple[list[ProofTable], list[ProofTable]]:
    """Per arm the rows to show and those to fold: what was scored as planned, when there is a lot of it."""
    rows = [(arm, proof_rows(arm.proof)) for arm in arms]
    many = sum(len(found) for _, found in rows) > UNFOLDED
    folded = [(arm, [row for row in found if many and _expected(row)]) for arm, found in rows]
    shown = [(arm, [row for row in found if not (many and _expected(row))]) for arm, found in rows]
    return shown, [(arm, found) for arm, found in folded if found]


def _expected(row: ProofRow) -> bool:
    return row.state == "pass" and row.where.startswith("scored")


@dataclass(frozen=True)
class ScoreTable:
    """Arms × conditions of one endpoint; one scale for all cells."""

    endpoint: str
    unit: str
    conditions: list[str]
    rows: dict[str, dict[str, ArmScore]]
    ends: list[str]
    strip: Callable[[ArmScore, int], Markup]


def score_tables(arms: Sequence[ArmResult], order: Sequence[str]) -> list[ScoreTable]:
    """A table per endpoint, conditions in the order of the study."""
    found: dict[tuple[str, str], dict[str, dict[str, ArmScore]]] = {}
    for arm in arms:
        for score in arm.scores:
            found.setdefault((score.endpoint, score.unit), {}).setdefault(arm.name, {})[score.condition] = score
    return [_score_table(endpoint, unit, rows, order) for (endpoint, unit), rows in found.items()]


def _score_table(endpoint: str, unit: str, rows: dict[str, dict[str, ArmScore]], order: Sequence[str]) -> ScoreTable:
    used = dict.fromkeys([*order, *(name for row in rows.values() for name in row)])
    scores = [score for row in rows.values() for score in row.values()]
    x = scale_of(scores)
    ends = [amount(end, unit) for end in (x.low, x.high)] if known(s.mean for s in scores) else []
    conditions = [name for name in used if any(name in row for row in rows.values())]
    return ScoreTable(endpoint, unit, conditions, rows, ends, lambda score, arm: seed_strip(score, arm, x))


@dataclass(frozen=True)
class Forest:
    """Differences of one unit as rows over one axis."""

    name: str
    rows: list[tuple[Any, Markup]]
    axis: Markup


def forests(comparisons: Sequence[ComparisonResult]) -> list[Forest]:
    """A forest per unit."""
    return [_forest(name, members, members[0].unit) for name, members in families(comparisons)]


def _forest(name: str, members: Sequence[ComparisonResult], unit: str) -> Forest:
    x = axis_of(members)
    return Forest(name, [(c, forest_row(c, x)) for c in members], forest_axis(x, unit))


def came_back(recovered: Sequence[RecoveredResult]) -> Forest:
    """The share of the loss that each arm returned, as a forest."""
    rows = [r for r in recovered if finite(r.share)]
    drawn = _forest("", [_as_comparison(r) for r in rows], "%")
    return Forest("", [(r, svg) for r, (_, svg) in zip(rows, drawn.rows, strict=True)], drawn.axis)


def _as_comparison(r: RecoveredResult) -> ComparisonResult:
    low, high = (end if finite(end) else None for end in (r.interval.low, r.interval.high))
    sure = low is not None and low > 0
    verdict: Literal["shown", "not shown"] = "shown" if sure else "not shown"
    return ComparisonResult(a="", b="", difference=r.share, ci_low=low, ci_high=high, scale=100, unit="%", verdict=verdict)


def claim(comparisons: Sequence[ComparisonResult]) -> tuple[ComparisonResult, Markup, Markup] | None:
    """The primary comparison, on an axis of its own."""
    main = next((c for c in comparisons if c.primary), None)
    if main is None or not finite(main.difference):
        return None
    x = axis_of([main])
    return main, forest_row(main, x), forest_axis(x, main.unit)


def learning_curves(arms: Sequence[ArmResult]) -> list[tuple[str, str, Drawing]]:
    """A figure per curve, in order of appearance: its name, what its band is, and the drawing."""
    found: dict[str, list[Line]] = {}
    bands: dict[str, str] = {}
    for i, arm in enumerate(arms):
        for curve in arm.curves:
            found.setdefault(curve.name, []).append(Line(i, arm.name, curve.points))
            bands.setdefault(curve.name, curve.band)
    drawable = {n: lines for n, lines in found.items() if known(p.mean for line in lines for p in line.points)}
    return [(name, bands[name], curves(name, lines, unit_of(name))) for name, lines in drawable.items()]


def roughness_table(arms: Sequence[ArmResult]) -> Table:
    """How rough every curve is: curves × arms."""
    known_ones = {(curve.name, arm.name): curve.roughness for arm in arms for curve in arm.curves if finite(curve.roughness)}
    names = list(dict.fromkeys(name for name, _ in known_ones))
    rows = [(name, [amount(known_ones.get((name, arm.name)), unit_of(name)) for arm in arms]) for name in names]
    return Table([arm.name for arm in arms], rows)


@dataclass(frozen=True)
class Table:
    """Names and cells."""

    heads: list[str]
    rows: list[tuple[str, list[str]]]


def step_tables(found: Sequence[StepComparison]) -> list[tuple[str, Table]]:
    """Per curve the differences to the baseline: arms × steps, each with its interval."""
    made = []
    for curve in dict.fromkeys(one.curve for one in found):
        members = [one for one in found if one.curve == curve]
        steps = sorted({p.step for one in members for p in one.points})
        rows = []
        for one in members:
            cells = {p.step: difference_at(p, one.scale, one.unit) for p in one.points}
            rows.append((f"{one.a} − {one.b}", [cells.get(step, "–") for step in steps]))
        unit = f", {members[0].unit}" if members[0].unit else ""
        made.append((curve + unit, Table([number(step) for step in steps], rows)))
    return made


def diagnosis_rows(d: DiagnosisResult) -> list[HeatmapRow]:
    """Probes, statistics and the σ made of them, each a row over the layers."""
    layers = [row.layer for row in d.layers]
    seen = {probe for row in d.layers for probe in row.results}
    probes = [*(p for p in PROBES if p in seen), *sorted(seen.difference(PROBES))]
    rows = [status_row(p, layers, [row.results.get(p) for row in d.layers]) for p in probes]
    for name in dict.fromkeys(key for row in d.layers for key in row.statistics):
        values = [row.statistics.get(name) for row in d.layers]
        rows.append(value_row(name, layers, values, Shading.of(values)))
    given = {s.layer: s for s in d.sigmas}
    if given and layers:
        words = [given[n].label if n in given else "" for n in layers]
        rows.append(bar_row("σ", layers, [given[n].sigma if n in given else None for n in layers], words))
    return rows


def _axis_of(d: DiagnosisResult) -> Markup:
    return layer_axis([row.layer for row in d.layers], [] if d.layer is None else [d.layer])


def strength_table(robustness: Sequence[Robustness], unit: str) -> Table:
    """The numbers of the robustness curves: arms × conditions; an arm that lacks a condition has a dash there."""
    heads = {p.condition or p.label: p.label or number(p.x) for r in robustness for p in r.points}
    means = [(r.arm, {p.condition or p.label: amount(p.mean, unit) for p in r.points}) for r in robustness]
    return Table(list(heads.values()), [(arm, [row.get(key, "–") for key in heads]) for arm, row in means])


@dataclass(frozen=True)
class Panel:
    """One reading, arms × layers."""

    name: str
    meaning: str
    rows: list[tuple[int, HeatmapRow]]
    shading: Shading


@dataclass(frozen=True)
class MechanismView:
    """All readings under one condition."""

    condition: str
    losses: list[tuple[int, str, float | None]]
    constant: list[tuple[str, str, float]]
    panels: list[Panel]
    axis: Markup


def mechanisms(f: Findings) -> list[MechanismView]:
    """Per condition: the loss of each arm and a panel per reading; the first and the primary one lead."""
    marked = sorted({d.layer for d in f.diagnoses if d.layer is not None})
    conditions = list(dict.fromkeys(m.condition for arm in f.arms for m in arm.mechanism))
    primary = f.study.primary.condition if f.study.primary is not None else None
    order = dict.fromkeys([*conditions[:1], *(c for c in conditions if c == primary), *conditions])
    every = [row for arm in f.arms for m in arm.mechanism for row in m.layers]
    shadings = {name: Shading.of([getattr(row, name) for row in every]) for name in READINGS}
    return [_mechanism(condition, f.arms, marked, shadings) for condition in order]


def shown_mechanisms(arms: Sequence[ArmResult]) -> int:
    """How many conditions are drawn: all, unless arms and layers are so many that the page would grow beyond reason."""
    cells = sum(max((len(m.layers) for m in arm.mechanism), default=0) for arm in arms) * len(READINGS)
    return max(2, CELLS // max(cells, 1))


def _mechanism(condition: str, arms: Sequence[ArmResult], marked: Sequence[int], shadings: dict[str, Shading]) -> MechanismView:
    read = [(i, arm.name, m) for i, arm in enumerate(arms) for m in arm.mechanism if m.condition == condition]
    layers = sorted({row.layer for _, _, m in read for row in m.layers})
    seen = {name: known(getattr(row, name) for _, _, m in read for row in m.layers) for name in READINGS}
    flat = [name for name, values in seen.items() if values and min(values) == max(values)]
    varied = [name for name, values in seen.items() if values and name not in flat]
    return MechanismView(
        condition,
        losses=[(i, name, m.loss) for i, name, m in read if finite(m.loss)],
        constant=[(name, READINGS[name], seen[name][0]) for name in flat],
        panels=[_panel(name, read, layers, shadings[name]) for name in varied],
        axis=layer_axis(layers, marked),
    )


def _panel(name: str, read: Sequence[Read], layers: Sequence[int], shading: Shading) -> Panel:
    table = [(i, arm, {row.layer: getattr(row, name) for row in m.layers}) for i, arm, m in read]
    rows = [(i, value_row(arm, layers, [row.get(n) for n in layers], shading)) for i, arm, row in table]
    return Panel(name, READINGS[name], rows, shading)


def samples(arms: Sequence[ArmResult]) -> list[Answers]:
    """Answers by arm and condition."""
    made = []
    for i, arm in enumerate(arms):
        groups: dict[str, list[Sample]] = {}
        for sample in arm.samples:
            groups.setdefault(sample.condition, []).append(sample)
        if groups:
            made.append((i, arm.name, groups))
    return made


def shown_samples(made: Sequence[Answers]) -> int:
    """How many answers of an arm under a condition are shown: six, or fewer where there are many arms and conditions."""
    return max(1, min(6, SAMPLES // max(sum(len(groups) for _, _, groups in made), 1)))

"""The page of a study: one HTML file that says first what was shown, and then everything a reader needs to doubt it.

The page is made from the findings and from nothing else, so it can be drawn again on any machine; no torch is imported. It
loads nothing: style, script and drawings are inline, and a content policy in its head forbids the browser to fetch. With
JavaScript off only sorting, the theme button, hiding arms and the readout of single cells are lost.

The order is that of a careful reader, not that of the work: the verdict with its interval; what was asked before the
run; scores with every seed; all comparisons, not the good ones; then curves, the diagnosis, the proof that the faults were
there, and the way to the records. A section without data is left out, except where its absence is itself a finding (no
comparison, no proof).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from shaketable.report import strips, study_tables, wording
from shaketable.report.figures import COLORS, Drawing, Line, Scale, curves, robustness, schedule, swatch
from shaketable.report.strips import HeatmapRow, ProofRow, Shading
from shaketable.report.wording import finite, known
from shaketable.study.analysis.results import (
    SCHEMA,
    ArmResult,
    ArmScore,
    ComparisonResult,
    DiagnosisResult,
    Findings,
    Sample,
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
ProofTable = tuple[ArmResult, list[ProofRow]]


def page(findings: Findings) -> str:
    """The self-contained HTML page of a study, or of a single run."""
    f = findings.visible()
    numbers = {arm.name: i for i, arm in reversed(list(enumerate(f.arms)))}
    answers = [(i, arm.name, _by_condition(arm.samples)) for i, arm in enumerate(f.arms) if arm.samples]
    per_condition = max(1, min(6, SAMPLES // max(sum(len(groups) for _, _, groups in answers), 1)))
    shown = (min(len(items), per_condition) for _, _, groups in answers for items in groups.values())
    cells = sum(max((len(m.layers) for m in arm.mechanism), default=0) for arm in f.arms) * len(READINGS)
    readings, drawn = mechanisms(f), max(2, CELLS // max(cells, 1))
    shown_proof, folded_proof = proof_tables(f.arms)
    main = next((c for c in f.comparisons if c.primary and finite(c.difference)), None)
    return _template().render(
        f=f,
        s=f.study,
        arms=f.arms,
        of_arm=numbers,
        colors=COLORS,
        swatch=swatch,
        badge=wording.badge(f),
        missing=wording.missing_runs(f.runs),
        counts=Counter(run.status for run in f.runs),
        marks=wording.MARKS,
        verdicts=wording.STATUS_OF,
        proof=wording.proof_summary(f.arms),
        proven=shown_proof,
        folded_proof=folded_proof,
        meaning=strips.MEANING,
        tables=score_tables(f.arms, [c.name for c in f.study.conditions]),
        claim=None if main is None else forest("", [main]),
        recovered=study_tables.recovered_table(f),
        comparisons=study_tables.comparison_table(f),
        forests=[forest(name, members) for name, members in strips.families(f.comparisons)],
        curves=learning_curves(f.arms),
        curve_table=study_tables.curve_table(f),
        step_tables=study_tables.step_tables(f),
        robust=robustness(
            [(numbers[r.arm], r.arm, r.points) for r in f.robustness if r.arm in numbers], wording.strength_unit(f.robustness)
        ),
        strengths=study_tables.strength_table(f),
        diagnoses=[(d, diagnosis_rows(d), _layer_axis(d)) for d in f.diagnoses],
        schedules=[(i, svg) for i, arm in enumerate(f.arms) if (svg := schedule(i, arm.name, arm.sigma))],
        mechanisms=readings[:drawn],
        left_out=[m.condition for m in readings[drawn:]],
        named=wording.named(f),
        methods_of=wording.methods_of,
        place=wording.place,
        costs=study_tables.cost_table(f),
        runs=study_tables.run_table(f),
        samples=answers,
        per_condition=per_condition,
        excerpt=wording.excerpt_length(shown),
        roughness=wording.ROUGHNESS,
        method=wording.METHOD,
        schema=SCHEMA,
    )


@cache
def _template() -> Template:
    """Compiled once: a store of studies is reported in one go."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {name: getattr(wording, name) for name in ("number", "signed", "amount", "fact", "counted")}
    environment.filters |= {"link": study_tables.link, "raw": study_tables.raw}
    return environment.get_template("study.html.jinja")


def _by_condition(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.condition, []).append(sample)
    return groups


def proof_tables(arms: Sequence[ArmResult]) -> tuple[list[ProofTable], list[ProofTable]]:
    """Per arm the rows to show and those to fold: what was scored as planned, when there is a lot of it."""
    rows = [(arm, strips.proof_rows(arm.proof)) for arm in arms]
    many = sum(len(found) for _, found in rows) > UNFOLDED

    def folds(row: ProofRow) -> bool:
        return many and row.state == "pass" and row.where.startswith("scored")

    shown = [(arm, [row for row in found if not folds(row)]) for arm, found in rows]
    folded = [(arm, [row for row in found if folds(row)]) for arm, found in rows]
    return shown, [(arm, found) for arm, found in folded if found]


@dataclass(frozen=True)
class ScoreTable:
    """Arms × conditions of one endpoint; one scale for all cells."""

    endpoint: str
    unit: str
    conditions: list[str]
    rows: dict[str, dict[str, ArmScore]]
    ends: list[str]
    scale: Scale

    def strip(self, score: ArmScore, arm: int) -> Markup:
        """The drawing of a cell."""
        return strips.seed_strip(score, arm, self.scale)


def score_tables(arms: Sequence[ArmResult], order: Sequence[str]) -> list[ScoreTable]:
    """A table per endpoint, conditions in the order of the study."""
    found: dict[tuple[str, str], dict[str, dict[str, ArmScore]]] = {}
    for arm in arms:
        for score in arm.scores:
            found.setdefault((score.endpoint, score.unit), {}).setdefault(arm.name, {})[score.condition] = score
    made = []
    for (endpoint, unit), rows in found.items():
        scores = [score for row in rows.values() for score in row.values()]
        x, there = strips.scale_of(scores), {score.condition for score in scores}
        ends = [wording.amount(end, unit) for end in (x.low, x.high)] if known(s.mean for s in scores) else []
        conditions = [name for name in dict.fromkeys([*order, *(s.condition for s in scores)]) if name in there]
        made.append(ScoreTable(endpoint, unit, conditions, rows, ends, x))
    return made


@dataclass(frozen=True)
class Forest:
    """Differences of one unit as rows over one axis."""

    name: str
    rows: list[tuple[ComparisonResult, Markup]]
    axis: Markup


def forest(name: str, members: Sequence[ComparisonResult]) -> Forest:
    """Comparisons of one unit as a forest."""
    x = strips.axis_of(members)
    return Forest(name, [(c, strips.forest_row(c, x)) for c in members], strips.forest_axis(x, members[0].unit))


def learning_curves(arms: Sequence[ArmResult]) -> list[tuple[str, str, Drawing]]:
    """A figure per curve, in order of appearance: its name, what its band is, and the drawing."""
    found: dict[str, list[Line]] = {}
    bands: dict[str, str] = {}
    for i, arm in enumerate(arms):
        for curve in arm.curves:
            if known(p.mean for p in curve.points):
                found.setdefault(curve.name, []).append(Line(i, arm.name, curve.points))
                bands.setdefault(curve.name, curve.band)
    return [(name, bands[name], curves(name, lines, wording.unit_of(name))) for name, lines in found.items()]


def diagnosis_rows(d: DiagnosisResult) -> list[HeatmapRow]:
    """Probes, statistics and the σ made of them, each a row over the layers."""
    layers = [row.layer for row in d.layers]
    seen = {probe for row in d.layers for probe in row.results}
    probes = [*(p for p in wording.PROBES if p in seen), *sorted(seen.difference(wording.PROBES))]
    rows = [strips.status_row(p, layers, [row.results.get(p) for row in d.layers]) for p in probes]
    for name in dict.fromkeys(key for row in d.layers for key in row.statistics):
        values = [row.statistics.get(name) for row in d.layers]
        rows.append(strips.value_row(name, layers, values, Shading.of(values)))
    given = {s.layer: s for s in d.sigmas}
    if given and layers:
        words = [given[n].label if n in given else "" for n in layers]
        rows.append(strips.bar_row("σ", layers, [given[n].sigma if n in given else None for n in layers], words))
    return rows


def _layer_axis(d: DiagnosisResult) -> Markup:
    return strips.layer_axis([row.layer for row in d.layers], [] if d.layer is None else [d.layer])


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
    every = [row for arm in f.arms for m in arm.mechanism for row in m.layers]
    shadings = {name: Shading.of([getattr(row, name) for row in every]) for name in READINGS}
    made = []
    for condition in dict.fromkeys([*conditions[:1], *(c for c in conditions if c == primary), *conditions]):
        read = [(i, arm.name, m) for i, arm in enumerate(f.arms) for m in arm.mechanism if m.condition == condition]
        layers = sorted({row.layer for _, _, m in read for row in m.layers})
        constant, panels = [], []
        for name, meaning in READINGS.items():
            seen = known(getattr(row, name) for _, _, m in read for row in m.layers)
            if seen and min(seen) == max(seen):
                constant.append((name, meaning, seen[0]))
            elif seen:
                rows: list[tuple[int, HeatmapRow]] = []
                for i, arm, m in read:
                    own: dict[int, Any] = {row.layer: getattr(row, name) for row in m.layers}
                    rows.append((i, strips.value_row(arm, layers, [own.get(n) for n in layers], shadings[name])))
                panels.append(Panel(name, meaning, rows, shadings[name]))
        losses: list[tuple[int, str, float | None]] = [(i, name, m.loss) for i, name, m in read if finite(m.loss)]
        made.append(MechanismView(condition, losses, constant, panels, strips.layer_axis(layers, marked)))
    return made

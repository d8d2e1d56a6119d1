"""The page of a study: one HTML file that says first what was shown, and then everything a reader needs to doubt it.

The page is made from the findings alone, without torch, and loads nothing: style, script and drawings are inline. With
JavaScript off only sorting, the theme button, hiding arms and the readout of single cells are lost. A section without data is
left out, except where its absence is itself a finding (no comparison, no proof).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from markupsafe import Markup

from shaketable.report import figures, study_tables, wording
from shaketable.report.figures import Drawing, HeatmapRow, Line, Point, Scale
from shaketable.report.render import render
from shaketable.report.wording import finite, known
from shaketable.study.analysis.results import (
    SCHEMA,
    ArmResult,
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
MEANING = {
    "agrees": "measured as asked",
    "proven": "values changed; this fault has no magnitude to compare",
    "differs": "values changed, but not as strongly as asked",
    "inert": "nothing changed",
}
DRAWN, PER_CONDITION, EXCERPT = 4, 2, 400
"""Conditions of the mechanism, answers to each condition, and characters of an answer that are on a page."""


def page(findings: Findings) -> str:
    """The self-contained HTML page of a study, or of a single run."""
    f = findings.visible()
    filters = {name: getattr(wording, name) for name in ("number", "signed", "fact", "counted")}
    readings = mechanisms(f)
    main = f.primary if f.primary is not None and finite(f.primary.difference) else None
    return render(
        "study.html.jinja",
        {**filters, "link": study_tables.link},
        f=f,
        s=f.study,
        arms=f.arms,
        colors=figures.COLORS,
        swatch=figures.swatch,
        badge=wording.badge(f),
        missing=wording.missing_runs(f.runs),
        counts=Counter(run.status for run in f.runs),
        marks=wording.MARKS,
        verdicts=wording.STATUS_OF,
        proof=wording.proof_summary(f.arms),
        proven=study_tables.proof_table(f),
        meaning=MEANING,
        proof_states=study_tables.PROOF_STATES,
        scores=study_tables.score_tables(f),
        claim=None if main is None else forest("", [main]),
        recovered=study_tables.recovered_table(f),
        comparisons=study_tables.comparison_table(f),
        forests=[forest(name, members) for name, members in figures.families(f.comparisons)],
        curves=learning_curves(f.arms),
        curve_table=study_tables.curve_table(f),
        step_tables=study_tables.step_tables(f),
        robust=robustness(f),
        diagnoses=[(d, diagnosis_rows(d), figures.layer_axis([x.layer for x in d.layers], [d.layer])) for d in f.diagnoses],
        mechanisms=readings[:DRAWN],
        left_out=[m.condition for m in readings[DRAWN:]],
        named=wording.named(f),
        methods_of=wording.methods_of,
        place=wording.place,
        costs=study_tables.cost_table(f),
        runs=study_tables.run_table(f),
        samples=[(i, arm.name, _grouped(arm.samples)) for i, arm in enumerate(f.arms) if arm.samples],
        per_condition=PER_CONDITION,
        excerpt=EXCERPT,
        roughness=wording.ROUGHNESS,
        method=wording.METHOD,
        schema=SCHEMA,
    )


def _grouped(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    return {condition: list(group) for condition, group in groupby(samples, key=attrgetter("condition"))}


@dataclass(frozen=True)
class Forest:
    name: str
    rows: list[tuple[ComparisonResult, Markup]]
    axis: Markup


def forest(name: str, members: Sequence[ComparisonResult]) -> Forest:
    x = figures.forest_scale(members)
    return Forest(name, [(c, figures.forest_row(c, x)) for c in members], figures.forest_axis(x, members[0].unit))


def learning_curves(arms: Sequence[ArmResult]) -> list[tuple[str, Drawing]]:
    """A figure per curve, in order of appearance."""
    found: dict[str, list[Line]] = {}
    for i, arm in enumerate(arms):
        for curve in arm.curves:
            if known(p.mean for p in curve.points):
                points = [Point(p.step, p.mean, p.low, p.high) for p in curve.points]
                found.setdefault(curve.name, []).append(Line(i, arm.name, points))
    return [(name, figures.curves(name, lines, wording.unit_of(name))) for name, lines in found.items()]


def robustness(f: Findings) -> Drawing | None:
    """Accuracy over the magnitude of the fault, where conditions differ in nothing else."""
    places = {c.name: c.magnitude for c in f.study.conditions}
    lines = []
    for i, arm in enumerate(f.arms):
        scores = [s for s in arm.scores if s.endpoint == "accuracy"]
        points = [Point(x, s.mean, s.ci_low, s.ci_high) for s in scores if (x := places.get(s.condition)) is not None]
        if len(points) > 1:
            lines.append(Line(i, arm.name, sorted(points)))
    return figures.curves("accuracy", lines, "points", "magnitude") if lines else None


def diagnosis_rows(d: DiagnosisResult) -> list[HeatmapRow]:
    """The statistics of a diagnosis, each a row over the layers."""
    layers = [row.layer for row in d.layers]
    values = {name: [row.statistics.get(name) for row in d.layers] for row in d.layers for name in row.statistics}
    return [figures.value_row(name, layers, own, figures.shades(own)) for name, own in values.items()]


@dataclass(frozen=True)
class Panel:
    """One reading, arms × layers."""

    name: str
    meaning: str
    rows: list[tuple[int, HeatmapRow]]
    scale: Scale


@dataclass(frozen=True)
class MechanismView:
    """All readings under one condition."""

    condition: str
    losses: list[tuple[int, str, float | None]]
    panels: list[Panel]
    axis: Markup


def mechanisms(f: Findings) -> list[MechanismView]:
    """Per condition: the loss of each arm and a panel per reading; the first and the primary one lead."""
    marked = sorted({d.layer for d in f.diagnoses if d.layer is not None})
    conditions = list(dict.fromkeys(m.condition for arm in f.arms for m in arm.mechanism))
    primary = f.primary and f.primary.condition
    every = [row for arm in f.arms for m in arm.mechanism for row in m.layers]
    scales = {name: figures.shades([getattr(row, name) for row in every]) for name in READINGS}
    made = []
    for condition in dict.fromkeys([*conditions[:1], *(c for c in conditions if c == primary), *conditions]):
        read = [(i, arm.name, m) for i, arm in enumerate(f.arms) for m in arm.mechanism if m.condition == condition]
        layers = sorted({row.layer for _, _, m in read for row in m.layers})
        panels = []
        for name, meaning in READINGS.items():
            seen = known(getattr(row, name) for _, _, m in read for row in m.layers)
            if len(set(seen)) > 1:  # what is the same everywhere is not drawn
                rows: list[tuple[int, HeatmapRow]] = []
                for i, arm, m in read:
                    own: dict[int, Any] = {row.layer: getattr(row, name) for row in m.layers}
                    rows.append((i, figures.value_row(arm, layers, [own.get(n) for n in layers], scales[name])))
                panels.append(Panel(name, meaning, rows, scales[name]))
        losses: list[tuple[int, str, float | None]] = [(i, name, m.loss) for i, name, m in read if finite(m.loss)]
        made.append(MechanismView(condition, losses, panels, figures.layer_axis(layers, marked)))
    return made

"""The tables of a study's report. The page, the Markdown and the terminal show the same ones.

A cell is text; the rest of it is for some of them: the number that its column is sorted by, an arm's line, a link to a record,
a state's colour, a bar or a drawing, and what stands in for a drawing where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from shaketable.report.figures import Scale, families, seed_scale, seed_strip
from shaketable.report.wording import (
    BADGES,
    amount,
    chance,
    duration,
    finite,
    known,
    number,
    percent,
    place,
    ranges,
    share_of,
    signed,
    unit_of,
    with_interval,
)
from shaketable.study.analysis.results import ArmResult, ArmScore, ComparisonResult, Findings, Proof, RunFacts

RUN_STATES = {"done": "pass", "running": "inconclusive", "partial": "suspect", "missing": "suspect"}
PROOF_STATES = {"agrees": "pass", "proven": "pass", "differs": "suspect", "inert": "fail"}


@dataclass(frozen=True)
class TableCell:
    text: str
    value: float | None = None
    arm: int | None = None
    link: str = ""
    state: str = ""
    note: str = ""
    """In smaller letters, or in brackets."""
    drawing: Markup | None = None
    seeds: str = ""
    """The seeds of a drawing as text."""

    @property
    def sorts_by(self) -> str:
        """The number for the script that sorts; empty when there is none."""
        return f"{self.value:.6g}" if finite(self.value) else ""


@dataclass(frozen=True)
class StudyTable:
    """Columns by name, those of numbers marked, and rows."""

    title: str
    columns: dict[str, str]
    """Each with how it is sorted: `text`, `number`, or not at all; `interval` is aligned as numbers are, `code` set as code."""
    rows: list[list[TableCell]]


def score_tables(f: Findings) -> list[StudyTable]:
    """A table per endpoint, arms × conditions; one scale for all of its drawings."""
    made = []
    order = [c.name for c in f.study.conditions]
    for endpoint, unit in dict.fromkeys((s.endpoint, s.unit) for arm in f.arms for s in arm.scores):
        scores = [{s.condition: s for s in arm.scores if s.endpoint == endpoint} for arm in f.arms]
        there = {name for own in scores for name in own}
        names = [name for name in dict.fromkeys([*order, *sorted(there)]) if name in there]
        x = seed_scale(s for own in scores for s in own.values())
        rows = [
            [TableCell(f.arms[i].name, arm=i), *(_score(own.get(name), i, x) for name in names)]
            for i, own in enumerate(scores)
            if own
        ]
        title = f"{endpoint}, {unit}".removesuffix(", ")
        made.append(StudyTable(title, {"arm": "text", **dict.fromkeys(names, "number")}, rows))
    return made


def _score(score: ArmScore | None, arm: int, x: Scale) -> TableCell:
    if score is None:
        return TableCell("–")
    mean, low, high, first = (amount(v, score.unit) for v in (score.mean, score.ci_low, score.ci_high, score.first))
    seeds = ", ".join(amount(p.value, score.unit) for p in score.per_seed)
    before = f"; before training {first}" if finite(score.first) else ""
    return TableCell(mean, score.mean, note=f"{low} … {high}", drawing=seed_strip(score, arm, x), seeds=seeds + before)


def comparison_table(f: Findings) -> StudyTable:
    """Every comparison with all tests, families of one unit together, the primary comparison first."""
    columns = dict.fromkeys(("comparison", "condition"), "text") | {"difference": "number", "95 % interval": "interval"}
    columns |= dict.fromkeys(("p", "p, Holm", "detectable"), "number") | {"seeds × problems": "interval", "verdict": "text"}
    rows = [_comparison(c) for _, members in families(f.comparisons) for c in members]
    return StudyTable("Comparisons", columns, rows)


def _comparison(c: ComparisonResult) -> list[TableCell]:
    difference, low, high, least = (signed(v, c.scale, c.unit) for v in (c.difference, c.ci_low, c.ci_high, c.detectable))
    return [
        TableCell(f"{'◆ ' if c.primary else ''}{c.a} − {c.b}"),
        TableCell(place(c.condition, c.endpoint)),
        TableCell(f"{difference} {c.unit}".strip(), c.difference),
        TableCell(f"{low} … {high}"),
        *(TableCell(chance(p), p) for p in (c.p, c.p_holm)),
        TableCell(least.lstrip("+"), c.detectable),
        TableCell(f"{number(c.seeds)} × {number(c.problems)}"),
        TableCell(c.verdict, state=BADGES[c.verdict][2]),
    ]


def recovered_table(f: Findings) -> StudyTable:
    rows = [
        [
            TableCell(r.arm),
            TableCell(r.condition),
            TableCell(amount(r.taken, "points"), r.taken),
            TableCell(f"{amount(r.before, 'points')} → {amount(r.after, 'points')}"),
            TableCell(f"{amount(r.clean, 'points')} → {amount(r.clean_after, 'points')}"),
            TableCell(share_of(r.share or 0.0, r.interval.low, r.interval.high), r.share),
        ]
        for r in f.recovered
        if finite(r.share)
    ]
    columns = {"arm": "", "condition": "", "cost of the fault": "interval", "before → after": "interval"}
    columns |= {"clean before → after": "interval", "recovered, 95 % interval": "interval"}
    return StudyTable("Recovered", columns, rows)


def curve_table(f: Findings) -> StudyTable:
    """The ends of every curve, and how rough it is."""
    rows = []
    for arm in f.arms:
        for curve in arm.curves:
            if means := known(p.mean for p in curve.points):
                values = (means[0], means[-1], curve.roughness)
                numbers = [TableCell(amount(value, unit_of(curve.name)), value) for value in values]
                rows.append([TableCell(arm.name), TableCell(curve.name), *numbers])
    columns = {"arm": "text", "curve": "text", "first": "number", "last": "number", "roughness": "number"}
    return StudyTable("First and last value, and roughness", columns, rows)


def step_tables(f: Findings) -> list[StudyTable]:
    """Per curve the differences to the baseline: arms × steps, each with its interval."""
    made = []
    for curve in dict.fromkeys(one.curve for one in f.at_steps):
        members = [one for one in f.at_steps if one.curve == curve]
        steps = sorted({p.step for one in members for p in one.points})
        rows = []
        for one in members:
            texts = {p.step: with_interval(p.difference, p.ci_low, p.ci_high, one.scale, one.unit) for p in one.points}
            rows.append([TableCell(f"{one.a} − {one.b}"), *(TableCell(texts.get(step, "–")) for step in steps)])
        title = f"{curve}, {members[0].unit}".removesuffix(", ")
        made.append(StudyTable(title, {"arms": "", **{f"step {number(s)}": "interval" for s in steps}}, rows))
    return made


def proof_table(f: Findings) -> StudyTable:
    """Places that say the same as one row, what is wrong first."""
    order = {"inert": 0, "differs": 1}
    rows = []
    for i, arm in enumerate(f.arms):
        groups: dict[Any, list[Proof]] = {}
        for one in arm.proof:
            groups.setdefault((one.where, one.fault, one.verdict, one.remark), []).append(one)
        rows += [_proof(i, arm, group) for group in sorted(groups.values(), key=lambda group: order.get(group[0].verdict, 2))]
    columns = dict.fromkeys(("arm", "verdict", "where"), "text") | {"fault": "code", "site": "code"}
    columns |= dict.fromkeys(("asked", "measured", "relative error", "changed, %", "forward", "backward"), "interval")
    return StudyTable("Proof of injection", columns | {"remark": ""}, rows)


def _proof(i: int, arm: ArmResult, places: Sequence[Proof]) -> list[TableCell]:
    first = places[0]
    survive = [100 * p.survival for p in places if first.fault.startswith("dead_zone") and finite(p.survival)]
    changed = extent(100 * p.changed for p in places if finite(p.changed))
    counts = ([c for c in (getattr(p, way) for p in places) if c is not None] for way in ("forward", "backward"))
    return [
        TableCell(arm.name, arm=i),
        TableCell(first.verdict or "unknown", state=PROOF_STATES.get(first.verdict, "inconclusive")),
        TableCell(first.where),
        TableCell(first.fault),
        TableCell(sites([p.site for p in places])),
        *(TableCell(extent(getattr(p, name) for p in places)) for name in ("asked", "measured", "error")),
        TableCell(changed + (f" ({extent(survive)} survive)" if survive else "")),
        *(TableCell(number(sum(found) if found else None)) for found in counts),
        TableCell(first.remark or ""),
    ]


def sites(names: Sequence[str]) -> str:
    """`layer.0–7` for many layers; the first few of other names and their number."""
    unique = list(dict.fromkeys(names))
    layers = [re.fullmatch(r"layer\.(\d+)", name) for name in unique]
    numbers = [int(m[1]) for m in layers if m]
    if len(unique) > 1 and len(numbers) == len(unique):
        return "layer." + ranges(numbers, 6)
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


def extent(values: Iterable[Any]) -> str:
    """0.05, or 0.049 … 0.051 where values differ."""
    seen = known(values)
    if not seen:
        return "–"
    low, high = number(min(seen)), number(max(seen))
    return low if low == high else f"{low} … {high}"


def cost_table(f: Findings) -> StudyTable:
    columns = dict.fromkeys(("seconds per step", "sampling", "injection", "AQN", "evaluation"), "number")
    rows = []
    for i, arm in enumerate(f.arms):
        c = arm.cost
        if c.is_known:
            shares = [TableCell(percent(s), s) for s in (c.sampling_share, c.injection_share, c.aqn_share)]
            step = TableCell(number(c.seconds_per_step), c.seconds_per_step)
            scoring = TableCell(duration(c.evaluation_seconds), c.evaluation_seconds)
            rows.append([TableCell(arm.name, arm=i), step, *shares, scoring])
    return StudyTable("Cost", {"arm": "text", **columns}, rows)


def run_table(f: Findings) -> StudyTable:
    columns = {"run": "text", "arm": "text", "seed": "number", "status": "text", "time": "number", "attempts": "number"}
    columns |= {"resumed": "number", "id": "code", "seal": "code", "remarks": ""}
    return StudyTable("Runs", columns, [_run(run) for run in f.runs])


def _run(run: RunFacts) -> list[TableCell]:
    return [
        TableCell(run.name, link="" if run.status == "missing" else link(run.folder)),
        TableCell(run.arm or ""),
        TableCell(number(run.seed), run.seed),
        TableCell(run.status, state=RUN_STATES.get(run.status, "fail")),
        TableCell(duration(run.seconds), run.seconds),
        *(TableCell(number(value), value) for value in (run.attempts, run.resumed)),
        TableCell(run.id or ""),
        TableCell(run.sha or ""),
        TableCell("; ".join(text for text in [run.error, *run.warnings] if text), state="fail" if run.error else ""),
    ]


def link(folder: str) -> str:
    """A relative folder as an address; empty for anything that could lead elsewhere."""
    outside = not folder or folder.startswith(("/", "\\")) or ":" in folder.split("/")[0]
    return "" if outside else quote(folder, safe="/-._~")

"""The tables of a study's report, as rows of text: the page and the Markdown show the same ones.

A cell is text; the rest of it is for the page alone: the number that its column is sorted by, an arm's marker, a link to a
record, a state's colour, a bar or a drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from markupsafe import Markup

from shaketable.report.strips import axis_of, families, forest_axis, forest_row
from shaketable.report.wording import (
    BADGES,
    amount,
    chance,
    difference_at,
    duration,
    finite,
    known,
    number,
    percent,
    place,
    share_of,
    signed,
    strength_unit,
    unit_of,
)
from shaketable.study.analysis.results import ArmResult, ComparisonResult, Findings, RecoveredResult, RunFacts

STATUSES = {"done": "pass", "running": "inconclusive", "partial": "suspect", "missing": "suspect"}


@dataclass(frozen=True)
class TableCell:
    """A cell of a table."""

    text: str
    value: float | None = None
    arm: int | None = None
    link: str = ""
    state: str = ""
    bar: float | None = None
    """From 0 to 1."""
    drawing: Markup | None = None

    @property
    def sorts_by(self) -> str:
        """The number for the script that sorts; empty when there is none."""
        return raw(self.value)


@dataclass(frozen=True)
class StudyTable:
    """Columns by name, those of numbers marked, and rows."""

    title: str
    columns: dict[str, str]
    """Each with how it is sorted: `text`, `number`, or not at all; `interval` is aligned as numbers are, `code` set as code."""
    rows: list[list[TableCell]]
    axis: Markup | None = None
    """Under the drawings of the last column."""


def comparison_table(f: Findings) -> StudyTable:
    """Every comparison with all tests, families of one unit together, the primary comparison first."""
    columns = dict.fromkeys(("comparison", "condition"), "text") | {"difference": "number", "95 % interval": "interval"}
    columns |= dict.fromkeys(("p", "p, Holm", "exact p over seeds"), "number") | {"exact McNemar p by seed": "interval"}
    columns |= {"detectable": "number", "seeds × problems": "interval", "verdict": "text"}
    rows = [_comparison(c) for _, members in families(f.comparisons) for c in members]
    return StudyTable("Comparisons", columns, rows)


def _comparison(c: ComparisonResult) -> list[TableCell]:
    keys = ("difference", "ci_low", "ci_high", "detectable")
    difference, low, high, least = (signed(getattr(c, key), c.scale, c.unit) for key in keys)
    return [
        TableCell(f"{'◆ ' if c.primary else ''}{c.a} − {c.b}"),
        TableCell(place(c.condition, c.endpoint)),
        TableCell(f"{difference} {c.unit}".strip(), c.difference),
        TableCell(f"{low} … {high}"),
        *(TableCell(chance(p), p) for p in (c.p, c.p_holm, c.p_seeds)),
        TableCell(" · ".join(chance(p) for p in c.mcnemar) or "–"),
        TableCell(least.lstrip("+"), c.detectable),
        TableCell(f"{number(c.seeds)} × {number(c.problems)}"),
        TableCell(c.verdict, state=BADGES[c.verdict][2]),
    ]


def recovered_table(f: Findings) -> StudyTable:
    """The share of the loss that each arm recovered."""
    rows = [r for r in f.recovered if finite(r.share)]
    drawn = [_as_comparison(r) for r in rows]
    x = axis_of(drawn)
    cells = [
        [
            TableCell(r.arm),
            TableCell(r.condition),
            TableCell(amount(r.taken, "points"), r.taken),
            TableCell(f"{amount(r.before, 'points')} → {amount(r.after, 'points')}"),
            TableCell(f"{amount(r.clean, 'points')} → {amount(r.clean_after, 'points')}"),
            TableCell(share_of(r.share or 0.0, r.interval.low, r.interval.high), r.share, drawing=forest_row(c, x)),
        ]
        for r, c in zip(rows, drawn, strict=True)
    ]
    columns = {"arm": "", "condition": "", "cost of the fault": "interval", "before → after": "interval"}
    columns |= {"clean before → after": "interval", "recovered, 95 % interval": "interval"}
    return StudyTable("Recovered", columns, cells, forest_axis(x, "%"))


def _as_comparison(r: RecoveredResult) -> ComparisonResult:
    low, high = (end if finite(end) else None for end in (r.interval.low, r.interval.high))
    verdict: Literal["shown", "not shown"] = "shown" if low is not None and low > 0 else "not shown"
    return ComparisonResult(a="", b="", difference=r.share, ci_low=low, ci_high=high, scale=100, unit="%", verdict=verdict)


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
            texts = {p.step: difference_at(p, one.scale, one.unit) for p in one.points}
            rows.append([TableCell(f"{one.a} − {one.b}"), *(TableCell(texts.get(step, "–")) for step in steps)])
        title = f"{curve}, {members[0].unit}".removesuffix(", ")
        made.append(StudyTable(title, {"arms": "", **{f"step {number(s)}": "interval" for s in steps}}, rows))
    return made


def strength_table(f: Findings) -> StudyTable:
    """The numbers of the robustness curves: arms × conditions; an arm that lacks a condition has a dash there."""
    unit = strength_unit(f.robustness)
    heads = {p.condition or p.label: p.label or number(p.x) for r in f.robustness for p in r.points}
    numbers = {arm.name: i for i, arm in reversed(list(enumerate(f.arms)))}
    rows = []
    for r in f.robustness:
        own = {}
        for p in r.points:
            mean, low, high = (amount(value, unit) for value in (p.mean, p.low, p.high))
            own[p.condition or p.label] = TableCell(f"{mean} ({low} … {high})", p.mean)
        rows.append([TableCell(r.arm, arm=numbers.get(r.arm)), *(own.get(key, TableCell("–")) for key in heads)])
    return StudyTable("Score by condition", {"arm": "text", **dict.fromkeys(heads.values(), "number")}, rows)


def cost_table(f: Findings) -> StudyTable:
    """Seconds per step, and the shares of a step."""
    there = [(i, arm) for i, arm in enumerate(f.arms) if arm.cost.is_known]
    slowest, longest = (_largest(f.arms, key) for key in ("seconds_per_step", "evaluation_seconds"))
    rows = []
    for i, arm in there:
        c = arm.cost
        shares = [TableCell(percent(s), s, bar=s or 0.0) for s in (c.sampling_share, c.injection_share, c.aqn_share)]
        step = TableCell(number(c.seconds_per_step), c.seconds_per_step, bar=(c.seconds_per_step or 0.0) / slowest)
        score = TableCell(duration(c.evaluation_seconds), c.evaluation_seconds, bar=(c.evaluation_seconds or 0.0) / longest)
        rows.append([TableCell(arm.name, arm=i), step, *shares, score])
    columns = dict.fromkeys(("seconds per step", "sampling", "injection", "AQN", "evaluation"), "number")
    return StudyTable("Cost", {"arm": "text", **columns}, rows)


def _largest(arms: Sequence[ArmResult], key: str) -> float:
    return max(known(getattr(arm.cost, key) for arm in arms), default=0.0) or 1.0


def run_table(f: Findings) -> StudyTable:
    """Every run with its record."""
    columns = {"run": "text", "arm": "text", "seed": "number", "status": "text", "time": "number", "attempts": "number"}
    columns |= {"resumed": "number", "id": "code", "seal": "code", "remarks": ""}
    return StudyTable("Runs", columns, [_run(run) for run in f.runs])


def _run(run: RunFacts) -> list[TableCell]:
    folder = "" if run.status == "missing" else link(run.folder)
    remarks = "; ".join(text for text in [run.error, *run.warnings] if text)
    return [
        TableCell(run.name, link=folder),
        TableCell(run.arm or ""),
        TableCell(number(run.seed), run.seed),
        TableCell(run.status, state=STATUSES.get(run.status, "fail")),
        TableCell(duration(run.seconds), run.seconds),
        *(TableCell(number(value), value) for value in (run.attempts, run.resumed)),
        TableCell(run.id or ""),
        TableCell(run.sha or ""),
        TableCell(remarks, state="fail" if run.error else ""),
    ]


def link(folder: str) -> str:
    """A relative folder as an address; empty for anything that could lead elsewhere."""
    outside = not folder or folder.startswith(("/", "\\")) or ":" in folder.split("/")[0]
    return "" if outside else quote(folder, safe="/-._~")


def raw(value: Any) -> str:
    """A number for the script that sorts; empty when there is none."""
    return f"{value:.6g}" if finite(value) else ""

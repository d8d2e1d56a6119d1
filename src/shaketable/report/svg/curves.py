"""Lines over steps: one per arm with its band, and a column per step that tells every value when pointed at.

A long run has more steps than a figure has pixels. Steps are then put into at most 120 bins: the line is the mean of a
bin, the band runs from its least to its greatest value, and the figure says so. Thinning (every n-th step) was rejected: a
noisy reward thinned is another reward, and the step that broke may be the one left out.

A missing value interrupts the line. A log scale is taken when all values are positive and spread over two decades, and is
named in the caption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import number
from shaketable.report.svg.scale import Scale, amount, finite, joined, known, needs_log
from shaketable.report.svg.style import dash, look, marker

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 196, 46, 14, 10, 26
BINS = 120
CROWD = 6
"""More lines than this have half as many bins; their bands are paler, and not told."""
Point = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One arm's values in one figure."""

    arm: int
    name: str
    points: list[Point]


@dataclass(frozen=True)
class Drawing:
    """A figure and what its caption must say of it."""

    svg: Markup
    log: bool
    per_bin: int


def curves(title: str, lines: Sequence[Line], unit: str = "") -> Drawing:
    """Lines over steps with their bands."""
    lines, per_bin = _binned(lines)
    values = [p[key] for line in lines for p in line.points for key in ("mean", "low", "high")]
    log = needs_log(p["mean"] for line in lines for p in line.points)
    steps = sorted({p["step"] for line in lines for p in line.points})
    y = Scale.over(values, HEIGHT - BOTTOM, TOP, log=log, margin=0.06)
    x = Scale.over(steps, LEFT, WIDTH - RIGHT, margin=0.0 if len(steps) > 1 else 0.04)
    label = f"{title} over steps{_told(lines, unit)}"
    parts = [axes(x, y, unit), *(_line(line, x, y) for line in lines), hits(_columns(lines, steps, unit), x, steps)]
    return Drawing(frame(label, joined(parts), "plot crowd" if len(lines) > CROWD else "plot"), log, per_bin)


def frame(label: str, body: Markup, kind: str = "plot", more: float = 0) -> Markup:
    """The SVG element of a figure with axes; `more` is room below for names that stand aslant."""
    svg = '<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(svg).format(kind, WIDTH, HEIGHT + more, label, body)


def axes(x: Scale | None, y: Scale, unit: str = "", x_name: str = "step") -> Markup:
    """Rules and numbers of y, and of x where it is a scale."""
    rule = Markup('<path class="rule" d="M{} {:.1f}H{}"/><text class="y" x="{}" y="{:.1f}">{}</text>')
    rules = [rule.format(LEFT, y(t), WIDTH - RIGHT, LEFT - 6, y(t) + 3.5, tick(t, unit)) for t in y.ticks(4)]
    base = Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT)
    if x is None:
        return joined([*rules, base])
    text = Markup('<text class="x" x="{:.1f}" y="{}">{}</text>')
    marks = [text.format(x(t), HEIGHT - BOTTOM + 14, tick(t)) for t in x.ticks(5)]
    name = Markup('<text class="end" x="{}" y="{}">{}</text>').format(WIDTH - RIGHT, HEIGHT - 1, x_name)
    return joined([*rules, base, *marks, name])


def tick(value: float, unit: str = "") -> str:
    """A number on an axis; fractions that are read in points are hundredths there too."""
    return number(float(f"{100 * value:.6g}")) if unit == "points" else number(value)


def hits(told: Sequence[str], x: Scale, at: Sequence[float]) -> Markup:
    """Columns to point at, each as wide as the way to its neighbours."""
    places = [x(step) for step in at]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - RIGHT]
    box = '<g class="hit"><rect x="{:.1f}" y="{}" width="{:.1f}" height="{}"/><path d="M{:.1f} {}V{}"/><title>{}</title></g>'
    return joined(
        Markup(box).format(left, TOP, right - left, HEIGHT - TOP - BOTTOM, place, TOP, HEIGHT - BOTTOM, text)
        for text, place, left, right in zip(told, places, edges, edges[1:], strict=False)
    )


def polylines(points: Sequence[tuple[float, float | None]], dashes: str) -> Markup:
    """The known stretches of a line; one that is a single point gets a dot of the line's width."""
    runs = [list(run) for there, run in groupby(points, key=lambda p: p[1] is not None) if there]
    shape = Markup('<polyline class="line" stroke-dasharray="{}" points="{}"/>')
    return joined(
        shape.format(dashes, " ".join(f"{x:.1f},{y:.1f}" for x, y in (run if len(run) > 1 else run * 2))) for run in runs
    )


def _line(line: Line, x: Scale, y: Scale) -> Markup:
    places = [(x(p["step"]), y(p["mean"]) if y.draws(p["mean"]) else None) for p in line.points]
    there = [(a, b) for a, b in places if b is not None]
    every = max(1, math.ceil(len(there) / 6))
    offset = min(line.arm * 2 % every, max(len(there) - 1, 0))
    pins = [marker(line.arm, a, b) for a, b in there[offset::every]]
    body = joined([_band(line.points, x, y), polylines(places, dash(line.arm)), *pins])
    return Markup("<g {}>{}</g>").format(look(line.arm), body)


def _band(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    runs = groupby(points, key=lambda p: y.draws(p["low"]) and y.draws(p["high"]))
    shapes = []
    for run in (list(members) for there, members in runs if there):
        there_and_back = [(p["step"], p["high"]) for p in run] + [(p["step"], p["low"]) for p in reversed(run)]
        if any(p["low"] < p["high"] for p in run):
            path = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in there_and_back)
            shapes.append(Markup('<path class="band" d="M{}Z"/>').format(path))
    return joined(shapes)


def _binned(lines: Sequence[Line]) -> tuple[list[Line], int]:
    longest = max((len(line.points) for line in lines), default=0)
    size = max(1, math.ceil(longest / (BINS if len(lines) <= CROWD else BINS // 2)))
    return [Line(line.arm, line.name, _bins(line.points, size)) for line in lines], size


def _bins(points: list[Point], size: int) -> list[Point]:
    if size == 1:
        return points
    return [_bin(points[i : i + size]) for i in range(0, len(points), size)]


def _bin(points: list[Point]) -> Point:
    means = known(p["mean"] for p in points)
    lows = known(v for p in points for v in (p["low"], p["mean"]))
    highs = known(v for p in points for v in (p["high"], p["mean"]))
    mean = sum(means) / len(means) if means else None
    return {"step": points[-1]["step"], "mean": mean, "low": min(lows, default=None), "high": max(highs, default=None)}


def _columns(lines: Sequence[Line], steps: Sequence[float], unit: str) -> list[str]:
    at = [{p["step"]: p for p in line.points} for line in lines]
    told = []
    for step in steps:
        there = [(line.name, p[step]) for line, p in zip(lines, at, strict=True) if step in p]
        rows = [f"{name}: {_value(p, unit, len(lines) <= CROWD)}" for name, p in there]
        told.append("\n".join([f"step {number(step)}", *rows]))
    return told


def _value(point: Point, unit: str, wide: bool) -> str:
    text = amount(point["mean"], unit)
    low, high = point["low"], point["high"]
    banded = wide and finite(low) and finite(high) and low < high
    return f"{text} ({amount(low, unit)} to {amount(high, unit)})" if banded else text


def _told(lines: Sequence[Line], unit: str) -> str:
    ends = [(line.name, known(p["mean"] for p in line.points)) for line in lines]
    told = [f"{name} from {amount(v[0], unit)} to {amount(v[-1], unit)}" for name, v in ends if v]
    return ": " + "; ".join(told) if told else ": no value can be drawn"

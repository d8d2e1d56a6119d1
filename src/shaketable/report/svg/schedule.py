"""The σ that was really set, over the steps, one small figure per arm.

Layers that share a schedule share a line, for a targeted schedule has two levels and not eighty. A σ holds until the next one
is set, so the line goes in stairs and only the steps at which it changes are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import number, ranges
from shaketable.report.svg.curves import HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, frame, hits
from shaketable.report.svg.scale import Scale, joined, known
from shaketable.report.svg.style import look

BASE = HEIGHT - 26
LABELLED = 6
MOST = 40
Corner = tuple[float, Any]


def schedule(arm: int, name: str, sigma: Sequence[dict[str, Any]]) -> Markup:
    """The schedules of one arm; empty when there is nothing to draw."""
    groups = _groups(sigma)
    values = known(v for points in groups for _, v in points)
    if not values:
        return Markup("")
    steps = sorted({step for points in groups for step, _ in points})
    x = Scale.over(steps, LEFT, WIDTH - RIGHT, margin=0.0 if len(steps) > 1 else 0.04)
    y = Scale.over([0.0, *values], BASE, TOP, margin=0.06)
    lines = [_stairs(points, x, y) for points in groups]
    ends = [_end(points, label, x, y) for points, label in groups.items()] if len(groups) <= LABELLED else []
    shown = steps[:: max(1, len(steps) // MOST)]
    body = [axes(x, y), Markup("<g {}>{}</g>").format(look(arm), joined(lines)), *ends, hits(_told(groups, shown), x, shown)]
    label = f"σ of {name} over steps: " + "; ".join(
        f"{label} from {number(points[0][1])} to {number(points[-1][1])}" for points, label in list(groups.items())[:LABELLED]
    )
    return frame(label, joined(body))


def _groups(sigma: Sequence[dict[str, Any]]) -> dict[tuple[Corner, ...], str]:
    """Corner points to the name of all that share them."""
    found: dict[tuple[Corner, ...], list[str]] = {}
    for series in sigma:
        if series["points"]:
            found.setdefault(_corners([(p[0], p[1]) for p in series["points"]]), []).append(series["label"])
    return {points: together(labels) for points, labels in found.items()}


def _corners(points: Sequence[Corner]) -> tuple[Corner, ...]:
    inner = [b for a, b in pairwise(points[:-1]) if a[1] != b[1]]
    thinned = inner[:: max(1, len(inner) // (2 * MOST))]
    return (*points[:1], *thinned, *points[1:][-1:])


def together(labels: Sequence[str]) -> str:
    """`layers 0–2, 4` for the names of layers; others as they are."""
    layers = [re.fullmatch(r"layer (\d+)", label) for label in labels]
    numbers = [int(m[1]) for m in layers if m]
    if len(numbers) > 1 and len(numbers) == len(labels):
        return "layers " + ranges(numbers, 4)
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _stairs(points: Sequence[Corner], x: Scale, y: Scale) -> Markup:
    """A σ holds until the next one is set."""
    runs = [list(run) for there, run in groupby(points, key=lambda p: y.draws(p[1])) if there]
    paths = [f"M{x(run[0][0]):.1f} {y(run[0][1]):.1f}" + "".join(f"H{x(s):.1f}V{y(v):.1f}" for s, v in run[1:]) for run in runs]
    return joined(Markup('<path class="line" d="{}"/>').format(path) for path in paths)


def _end(points: Sequence[Corner], label: str, x: Scale, y: Scale) -> Markup:
    """The name of a line, above its start, where schedules lie farthest apart."""
    step, value = next(((s, v) for s, v in points if y.draws(v)), (points[0][0], 0.0))
    return Markup('<text class="direct" x="{:.1f}" y="{:.1f}">{}</text>').format(x(step) + 5, y(value) - 4, label)


def _told(groups: dict[tuple[Corner, ...], str], steps: Sequence[float]) -> list[str]:
    told = []
    for step in steps:
        rows = [f"{label}: {number(_at(points, step))}" for points, label in list(groups.items())[:LABELLED]]
        more = [f"… and {len(groups) - LABELLED} more"] if len(groups) > LABELLED else []
        told.append("\n".join([f"step {number(step)}", *rows, *more]))
    return told


def _at(points: Sequence[Corner], step: float) -> Any:
    return next((v for s, v in reversed(points) if s <= step), points[0][1])

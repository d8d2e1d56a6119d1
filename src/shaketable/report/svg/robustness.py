"""Score against strength of the error, a whisker at every point, one line per arm.

The strength is an axis of numbers when every point has one. Otherwise the points are conditions side by side in the order in
which they were given, and nothing joins them: a line between two conditions that have no order would show a trend that is
not there. Arms are moved apart by a few pixels, or the whiskers of one would hide those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import number
from shaketable.report.svg.curves import HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, frame, hits, polylines
from shaketable.report.svg.scale import Scale, amount, finite, joined, known
from shaketable.report.svg.style import dash, look, marker

BASE = HEIGHT - 26
APART, LETTER, TILTED, LONGEST, SHORT = 5.0, 5.6, 62, 18, 9
Point = dict[str, Any]
Arm = tuple[int, str, Sequence[Point]]


@dataclass(frozen=True)
class Strengths:
    """The places along x: what tells points apart, their order, and what they are called."""

    key: str
    order: list[Any]
    labels: dict[Any, str]
    scale: Scale

    @classmethod
    def of(cls, points: Sequence[Point]) -> Strengths:
        """Numbers where every point has one, under their names if those are short; names otherwise."""
        numeric = all(finite(p["x"]) for p in points)
        key = "x" if numeric else "label"
        order = sorted({p[key] for p in points}) if numeric else list(dict.fromkeys(p[key] for p in points))
        at = order if numeric else range(len(order))
        scale = Scale.over(at, LEFT + 16, WIDTH - RIGHT - 16, margin=0.0 if len(order) > 1 else 0.04)
        own = not numeric or all(0 < len(p["label"]) <= SHORT for p in points)
        return cls(key, order, {p[key]: p["label"] if own else number(p["x"]) for p in points}, scale)

    @property
    def tilted(self) -> bool:
        """Whether the names of conditions need more room than there is side by side."""
        longest = max(map(len, self.labels.values()))
        return self.key == "label" and longest * LETTER * len(self.order) > WIDTH - LEFT - RIGHT

    def place(self, point: Point) -> float:
        """The x of a point."""
        return self.at(point[self.key])

    def at(self, value: Any) -> float:
        """The x of a strength."""
        return self.scale(value if self.key == "x" else self.order.index(value))


def robustness(arms: Sequence[Arm], unit: str = "points") -> Markup:
    """The figure, or nothing when no point has a mean."""
    every = [p for _, _, points in arms for p in points]
    if not known(p["mean"] for p in every):
        return Markup("")
    x = Strengths.of(every)
    y = Scale.over([p[k] for p in every for k in ("mean", "low", "high")], BASE, TOP, margin=0.06)
    apart = APART * min(1.0, 6 / len(arms))
    lines = [_arm(arm, x, y, apart * (i - (len(arms) - 1) / 2)) for i, arm in enumerate(arms)]
    told = [_told(x.labels[k], [(n, p) for _, n, points in arms for p in points if p[x.key] == k], unit) for k in x.order]
    columns = hits(told, x.scale, x.order if x.key == "x" else range(len(x.order)))
    body = joined([axes(None, y, unit), _names(x), *lines, columns])
    return frame("Score against strength. " + ". ".join(told), body, more=TILTED if x.tilted else 0)


def _arm(arm: Arm, x: Strengths, y: Scale, shift: float) -> Markup:
    i, _, points = arm
    ordered = sorted(points, key=x.place)
    places = [(x.place(p) + shift, y(p["mean"]) if finite(p["mean"]) else None) for p in ordered]
    whisker = Markup('<path class="whisker" d="M{:.1f} {:.1f}V{:.1f}"/>')
    there = [p for p in points if finite(p["low"]) and finite(p["high"])]
    whiskers = [whisker.format(x.place(p) + shift, y(p["low"]), y(p["high"])) for p in there]
    pins = [marker(i, a, b) for a, b in places if b is not None]
    line = [polylines(places, dash(i))] if x.key == "x" else []
    return Markup("<g {}>{}</g>").format(look(i), joined([*whiskers, *line, *pins]))


def _names(x: Strengths) -> Markup:
    """What stands under the axis; a number that would touch the one before is left out."""
    if x.tilted:
        text = Markup('<text class="end" transform="translate({:.1f} {}) rotate(-38)">{}</text>')
        names = {k: n if len(n) <= LONGEST else n[: LONGEST - 1] + "…" for k, n in x.labels.items()}
        return joined(text.format(x.at(k) + 4, BASE + 13, names[k]) for k in x.order)
    text, parts, free = Markup('<text class="x" x="{:.1f}" y="{}">{}</text>'), [], 0.0
    for k in x.order:
        half = LETTER * len(x.labels[k]) / 2
        if x.at(k) - half >= free:
            parts.append(text.format(x.at(k), BASE + 14, x.labels[k]))
            free = x.at(k) + half
    return joined(parts)


def _told(label: str, points: Sequence[tuple[str, Point]], unit: str) -> str:
    rows = [f"{name}: {amount(p['mean'], unit)} ({amount(p['low'], unit)} to {amount(p['high'], unit)})" for name, p in points]
    return "\n".join([label, *rows])

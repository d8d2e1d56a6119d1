"""Figures with axes as inline SVG: lines over steps, scores over strengths, σ over steps; coloured by the page's variables.

A long run has more steps than a figure has pixels. Steps are then put into at most 120 bins: the line is the mean of a bin, the
band runs from its least to its greatest value, and the figure says so; thinning would drop the step that broke. A missing value
interrupts a line. A log scale is taken when all values are positive and spread over two decades, and is named in the caption.

An arm has the same colour, dash and marker in every figure. The seven colours are those of Okabe and Ito without yellow; they
keep apart under every common colour blindness. Twelve markers and five dashes repeat with other periods, so that no two of the
first 35 arms share all three. Drawn by hand: a plotting library cannot follow
the theme of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from markupsafe import Markup

from shaketable.report.wording import amount, finite, known, number
from shaketable.study.analysis.results import CurvePoint, RobustnessPoint, Sigma

# ---- scales


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end]. `end` may be the smaller one, as heights are on a screen."""

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0
    log: bool = False

    @classmethod
    def over(
        cls, values: Iterable[Any], start: float = 0.0, end: float = 100.0, *, log: bool = False, margin: float = 0.04
    ) -> Scale:
        """A scale that holds the values with some air; values that are all equal lie in its middle."""
        seen = [v for v in known(values) if not log or v > 0]
        low, high = min(seen, default=0.1), max(seen, default=1.0)
        if log:
            air = (high / low) ** margin if high > low else 2.0
            return cls(low / air, high * air, start, end, True)
        air = margin * (high - low) if high > low else abs(high) * 0.1 or 1.0
        return cls(low - air, high + air, start, end)

    def __call__(self, value: float) -> float:
        """Where a value lies; beyond the ends it stays at the end."""
        low, high, v = (
            math.log10(x) if self.log else x for x in (self.low, self.high, max(value, 1e-300) if self.log else value)
        )
        return self.start + (self.end - self.start) * min(max((v - low) / (high - low), 0.0), 1.0)

    def draws(self, value: Any) -> bool:
        """Whether a value has a place."""
        return finite(value) and (value > 0 or not self.log)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside: 1, 2 or 5 times a power of ten; powers of ten on a long logarithmic scale."""
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(decades) > 1:
                return [10.0**d for d in decades][:: math.ceil(len(decades) / (about + 1))]
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / about))
        choices = [self._multiples(m * power) for m in (1, 2, 5, 10)]
        return min(choices, key=lambda ticks: abs(len(ticks) - about))

    def _multiples(self, step: float) -> list[float]:
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def needs_log(values: Iterable[Any], ratio: float = 100.0) -> bool:
    """All positive and spread over so many decades that a linear scale would show the largest only."""
    seen = known(values)
    return len(seen) > 1 and min(seen) > 0 and max(seen) > ratio * min(seen)


def joined(parts: Iterable[Markup]) -> Markup:
    """Pieces of a drawing as one."""
    return Markup("").join(parts)


# ---- how an arm looks


COLORS = 7
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")
MARKERS = (
    "M-3.6 0A3.6 3.6 0 1 1 3.6 0A3.6 3.6 0 1 1-3.6 0Z",
    "M-3.2-3.2H3.2V3.2H-3.2Z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0Z",
    "M0-4.2L4 3.2H-4Z",
    "M0 4.2L4-3.2H-4Z",
    "M-1.3-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4V-1.3H-1.3Z",
)
"""Filled for the first six arms, hollow for the next six."""


def look(arm: int) -> Markup:
    """The attributes of everything that is drawn of an arm: its colour class and its number, by which it can be hidden."""
    return Markup('class="arm c{}" data-arm="{}"').format(arm % COLORS, arm)


def marker(arm: int, x: float = 0, y: float = 0) -> Markup:
    """The arm's marker at a place of a view box."""
    hollow = " hollow" if arm // len(MARKERS) % 2 else ""
    shape = '<path class="marker{}" transform="translate({:.1f} {:.1f})" d="{}"/>'
    return Markup(shape).format(hollow, x, y, MARKERS[arm % len(MARKERS)])


def dash(arm: int) -> str:
    """The arm's dash pattern; empty for a solid line."""
    return DASHES[arm % len(DASHES)]


def swatch(arm: int) -> Markup:
    """A short line with the marker, to stand before the arm's name. It says nothing the name does not."""
    line = Markup('<path class="line" stroke-dasharray="{}" d="M0 7H28"/>').format(dash(arm))
    body = Markup("<g {}>{}{}</g>").format(look(arm), line, marker(arm, 14, 7))
    return Markup('<svg class="swatch" width="28" height="14" aria-hidden="true" focusable="false">{}</svg>').format(body)


# ---- lines over steps


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 196, 46, 14, 10, 26
BINS, FEWEST = 120, 8
"""Of a line; fewer than the most where there are more lines than `CROWD`."""
TOLD = 6
"""Lines of one arm whose values a figure's texts have; of lines that are arms, all."""
CROWD = 6
"""More lines than this have half as many bins; their bands are paler, and not told."""


@dataclass(frozen=True)
class Line:
    """One arm's values in one figure."""

    arm: int
    name: str
    points: Sequence[CurvePoint]


@dataclass(frozen=True)
class Drawing:
    """A figure and what its caption must say of it."""

    svg: Markup
    log: bool
    per_bin: int


def curves(title: str, lines: Sequence[Line], unit: str = "", *, labelled: bool = False) -> Drawing:
    """Lines over steps with their bands; `labelled` lines have their names beside them, and an axis from zero."""
    longest = max((len(line.points) for line in lines), default=0)
    per_bin = max(1, math.ceil(longest / max(FEWEST, min(BINS, BINS * CROWD // max(len(lines), 1)))))
    lines = [Line(line.arm, line.name, _binned(line.points, per_bin)) for line in lines]
    values = [getattr(p, key) for line in lines for p in line.points for key in ("mean", "low", "high")]
    values += [0.0] if labelled else []
    log = not labelled and needs_log(p.mean for line in lines for p in line.points)
    steps = sorted({p.step for line in lines for p in line.points})
    y = Scale.over(values, HEIGHT - BOTTOM, TOP, log=log, margin=0.06)
    x = Scale.over(steps, LEFT, WIDTH - RIGHT, margin=0.0 if len(steps) > 1 else 0.04)
    told = lines[:TOLD] if labelled else lines
    left = f"\n… and {len(lines) - TOLD} more" if len(told) < len(lines) else ""
    label = f"{title} over steps{_told(told, unit)}{left}"
    columns = [text + left for text in _columns(told, steps, unit)]
    names = [_name(line, x, y) for line in lines] if labelled and len(lines) <= CROWD else []
    drawn = joined(_line(line, x, y, bare=labelled) for line in lines)
    if labelled and lines:  # all of one arm
        drawn = Markup("<g {}>{}</g>").format(look(lines[0].arm), drawn)
    parts = [axes(x, y, unit), drawn, *names, hits(columns, x, steps)]
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
    dashed = Markup(' stroke-dasharray="{}"').format(dashes) if dashes else ""
    shape = Markup('<polyline class="line"{} points="{}"/>')
    return joined(
        shape.format(dashed, " ".join(f"{x:.1f},{y:.1f}" for x, y in (run if len(run) > 1 else run * 2))) for run in runs
    )


def _line(line: Line, x: Scale, y: Scale, *, bare: bool) -> Markup:
    """The line, and unless it is `bare` its band and markers."""
    places = [(x(p.step), y(p.mean) if p.mean is not None and y.draws(p.mean) else None) for p in line.points]
    drawn = polylines(places, dash(line.arm))
    if bare:
        return drawn
    there = [(a, b) for a, b in places if b is not None]
    every = max(1, math.ceil(len(there) / 6))
    offset = min(line.arm * 2 % every, max(len(there) - 1, 0))
    pins = [marker(line.arm, a, b) for a, b in there[offset::every]]
    return Markup("<g {}>{}</g>").format(look(line.arm), joined([_band(line.points, x, y), drawn, *pins]))


def _band(points: Sequence[CurvePoint], x: Scale, y: Scale) -> Markup:
    ends = [(p.step, p.low, p.high) for p in points]
    shapes = []
    for drawn, run in groupby(ends, key=lambda end: y.draws(end[1]) and y.draws(end[2])):
        known_ends = [(step, low, high) for step, low, high in run if drawn and low is not None and high is not None]
        if any(low < high for _, low, high in known_ends):
            there_and_back = [(s, high) for s, _, high in known_ends] + [(s, low) for s, low, _ in reversed(known_ends)]
            path = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in there_and_back)
            shapes.append(Markup('<path class="band" d="M{}Z"/>').format(path))
    return joined(shapes)


def _name(line: Line, x: Scale, y: Scale) -> Markup:
    """The name of a line, above its start."""
    step, value = next((p.step, p.mean) for p in line.points if p.mean is not None)
    return Markup('<text class="direct" x="{:.1f}" y="{:.1f}">{}</text>').format(x(step) + 5, y(value) - 4, line.name)


def _binned(points: Sequence[CurvePoint], size: int) -> Sequence[CurvePoint]:
    if size == 1:
        return points
    made = []
    for part in (points[i : i + size] for i in range(0, len(points), size)):
        means = known(p.mean for p in part)
        low = min(known(v for p in part for v in (p.low, p.mean)), default=None)
        high = max(known(v for p in part for v in (p.high, p.mean)), default=None)
        made.append(CurvePoint(step=part[-1].step, mean=sum(means) / len(means) if means else None, low=low, high=high))
    return made


def _columns(lines: Sequence[Line], steps: Sequence[int], unit: str) -> list[str]:
    """The values at each step: every line's, with its band where there are few lines."""
    at = [{p.step: p for p in line.points} for line in lines]
    told = []
    for step in steps:
        rows = [f"step {number(step)}"]
        for line, p in ((line, points[step]) for line, points in zip(lines, at, strict=True) if step in points):
            banded = len(lines) <= CROWD and finite(p.low) and finite(p.high) and p.low < p.high
            band = f" ({amount(p.low, unit)} to {amount(p.high, unit)})" if banded else ""
            rows.append(f"{line.name}: {amount(p.mean, unit)}{band}")
        told.append("\n".join(rows))
    return told


def _told(lines: Sequence[Line], unit: str) -> str:
    ends = [(line.name, known(p.mean for p in line.points)) for line in lines]
    told = [f"{name} from {amount(v[0], unit)} to {amount(v[-1], unit)}" for name, v in ends if v]
    return ": " + "; ".join(told) if told else ": no value can be drawn"


# ---- scores over strengths


BASE = HEIGHT - 26
APART, LETTER, TILTED, LONGEST, SHORT = 5.0, 5.6, 62, 18, 9
Arm = tuple[int, str, Sequence[RobustnessPoint]]


def robustness(arms: Sequence[Arm], unit: str = "points") -> Markup:
    """The figure, or nothing when no point has a mean.

    Along x are strengths where every point has one, under their names if those are short; else the names side by side.
    """
    every = [p for _, _, points in arms for p in points]
    if not known(p.mean for p in every):
        return Markup("")
    numeric = all(finite(p.x) for p in every)

    def key(point: RobustnessPoint) -> Any:
        return point.x if numeric else point.label

    keys = sorted({key(p) for p in every}) if numeric else list(dict.fromkeys(key(p) for p in every))
    named = not numeric or all(0 < len(p.label) <= SHORT for p in every)
    names = {key(p): p.label if named else number(p.x) for p in every}
    places = keys if numeric else range(len(keys))
    x = Scale.over(places, LEFT + 16, WIDTH - RIGHT - 16, margin=0.0 if len(keys) > 1 else 0.04)
    at = {k: x(place) for k, place in zip(keys, places, strict=True)}
    y = Scale.over([getattr(p, k) for p in every for k in ("mean", "low", "high")], BASE, TOP, margin=0.06)
    whisker = Markup('<path class="whisker" d="M{:.1f} {:.1f}V{:.1f}"/>')
    lines, told = [], {k: [name] for k, name in names.items()}
    for place, (i, arm, points) in enumerate(arms):
        shift = APART * min(1.0, 6 / len(arms)) * (place - (len(arms) - 1) / 2)
        ordered = sorted(points, key=lambda p: at[key(p)])
        means = [(at[key(p)] + shift, y(p.mean) if finite(p.mean) else None) for p in ordered]
        there = [(at[key(p)] + shift, p.low, p.high) for p in points if finite(p.low) and finite(p.high)]
        whiskers = [whisker.format(left, y(low), y(high)) for left, low, high in there]
        pins = [marker(i, left, top) for left, top in means if top is not None]
        line = [polylines(means, dash(i))] if numeric else []
        lines.append(Markup("<g {}>{}</g>").format(look(i), joined([*whiskers, *line, *pins])))
        for p in points:
            mean, low, high = (amount(value, unit) for value in (p.mean, p.low, p.high))
            told[key(p)].append(f"{arm}: {mean} ({low} to {high})")
    texts = ["\n".join(told[k]) for k in keys]
    tilted = not numeric and max(map(len, names.values())) * LETTER * len(keys) > WIDTH - LEFT - RIGHT
    labels = _tilted([(at[k], names[k]) for k in keys]) if tilted else _apart([(at[k], names[k]) for k in keys])
    body = joined([axes(None, y, unit), labels, *lines, hits(texts, x, places)])
    return frame("Score against strength. " + ". ".join(texts), body, more=TILTED if tilted else 0)


def _tilted(names: Sequence[tuple[float, str]]) -> Markup:
    """Names that need more room than there is side by side."""
    text = Markup('<text class="end" transform="translate({:.1f} {}) rotate(-38)">{}</text>')
    return joined(
        text.format(at + 4, BASE + 13, name if len(name) <= LONGEST else name[: LONGEST - 1] + "…") for at, name in names
    )


def _apart(names: Sequence[tuple[float, str]]) -> Markup:
    """Names side by side; one that would touch the one before is left out."""
    text, parts, free = Markup('<text class="x" x="{:.1f}" y="{}">{}</text>'), [], 0.0
    for at, name in names:
        half = LETTER * len(name) / 2
        if at - half >= free:
            parts.append(text.format(at, BASE + 14, name))
            free = at + half
    return joined(parts)


# ---- σ over steps


def schedule(arm: int, name: str, sigma: Sequence[Sigma]) -> Markup:
    """The schedules of one arm, a line for each group of layers; empty when there is nothing to draw."""
    groups = [(group.label, [CurvePoint(step=step, mean=value) for step, value in group.points]) for group in sigma]
    lines = [Line(arm, label, points) for label, points in groups if known(p.mean for p in points)]
    return curves(f"σ of {name}", lines, labelled=True).svg if lines else Markup("")

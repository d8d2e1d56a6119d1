"""The drawings of a study's page, as inline SVG that follows the page's theme: curves, forest rows, strips of seeds, heat rows.

An arm has one colour and one dash in every figure: the seven colours of Okabe and Ito without yellow, which keep apart under
every common colour blindness, and five dashes.

A curve with more steps than a figure has room for is binned: the line is the mean of a bin, the band runs from its least to its
greatest value, and the caption says so; thinning would drop the step that broke. The shaded zone of a forest row is what the
comparison could not have seen. Cells of a heat row are ten shades of one colour; one without a value is striped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from shaketable.report.wording import amount, finite, known, number, signed, with_interval
from shaketable.study.analysis.results import ArmScore, ComparisonResult

COLORS = 7
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def look(arm: int) -> Markup:
    """The attributes of everything that is drawn of an arm: its colour class and its number, by which it can be hidden."""
    return Markup('class="arm c{}" data-arm="{}"').format(arm % COLORS, arm)


def swatch(arm: int) -> Markup:
    """A short line to stand before the arm's name. It says nothing the name does not."""
    svg = '<svg class="swatch" width="28" height="14" aria-hidden="true" focusable="false"><g {}>{}</g></svg>'
    line = Markup('<path class="line" stroke-dasharray="{}" d="M0 7H28"/>').format(DASHES[arm % len(DASHES)])
    return Markup(svg).format(look(arm), line)


def _hit(text: str) -> Markup:
    """What a strip says when it is pointed at."""
    return Markup('<g class="hit"><rect/><title>{}</title></g>').format(text)


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
        low, high, v = self.low, self.high, value
        if self.log:
            low, high, v = math.log10(low), math.log10(high), math.log10(max(v, 1e-300))
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


# ---- curves

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 196, 46, 14, 10, 26
BINS, FEW = 60, 6
"""The most bins of a line, and the most lines whose bands are told."""


class Point(NamedTuple):
    """A mean at a place on the x axis, with the ends of its band."""

    x: float
    mean: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    arm: int
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Drawing:
    """A figure and what its caption must say of it."""

    svg: Markup
    log: bool
    per_bin: int


def curves(title: str, lines: Sequence[Line], unit: str = "", x_name: str = "step") -> Drawing:
    """Lines with their bands over steps, or over another quantity."""
    longest = max(len(line.points) for line in lines)
    per_bin = math.ceil(longest / BINS)
    lines = [Line(line.arm, line.name, _binned(line.points, per_bin)) for line in lines]
    log = needs_log(p.mean for line in lines for p in line.points)
    y = Scale.over((v for line in lines for p in line.points for v in p[1:]), HEIGHT - BOTTOM, TOP, log=log, margin=0.06)
    places = sorted({p.x for line in lines for p in line.points})
    x = Scale.over(places, LEFT, WIDTH - RIGHT, margin=0.0 if len(places) > 1 else 0.04)
    ends = [(line.name, known(p.mean for p in line.points)) for line in lines]
    told = [f"{name} from {amount(v[0], unit)} to {amount(v[-1], unit)}" for name, v in ends if v]
    label = f"{title} over {x_name}s: " + ("; ".join(told) or "no value can be drawn")
    parts = [_axes(x, y, unit, x_name), *(_line(line, x, y) for line in lines), *_columns(lines, places, x, unit, x_name)]
    svg = '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Drawing(Markup(svg).format(WIDTH, HEIGHT, label, joined(parts)), log, per_bin)


def _binned(points: Sequence[Point], size: int) -> Sequence[Point]:
    if size == 1:
        return points
    made = []
    for part in (points[i : i + size] for i in range(0, len(points), size)):
        means, every = known(p.mean for p in part), known(v for p in part for v in p[1:])
        mean = sum(means) / len(means) if means else None
        made.append(Point(part[-1].x, mean, min(every, default=None), max(every, default=None)))
    return made


def _axes(x: Scale, y: Scale, unit: str, x_name: str) -> Markup:
    rule = Markup('<path class="rule" d="M{} {:.1f}H{}"/><text class="y" x="{}" y="{:.1f}">{}</text>')
    text = Markup('<text class="x" x="{:.1f}" y="{}">{}</text>')
    rules = [rule.format(LEFT, y(t), WIDTH - RIGHT, LEFT - 6, y(t) + 3.5, tick(t, unit)) for t in y.ticks(4)]
    base = Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT)
    marks = [text.format(x(t), HEIGHT - BOTTOM + 14, tick(t)) for t in x.ticks(5)]
    name = Markup('<text class="end" x="{}" y="{}">{}</text>').format(WIDTH - RIGHT, HEIGHT - 1, x_name)
    return joined([*rules, base, *marks, name])


def tick(value: float, unit: str = "") -> str:
    """A number on an axis; fractions that are read in points are hundredths there too."""
    return number(float(f"{100 * value:.6g}")) if unit == "points" else number(value)


def _line(line: Line, x: Scale, y: Scale) -> Markup:
    """The line and its band; a stretch of a single point gets a dot of the line's width."""
    dashes = DASHES[line.arm % len(DASHES)]
    dashed = Markup(' stroke-dasharray="{}"').format(dashes) if dashes else ""
    shape, band = Markup('<polyline class="line"{} points="{}"/>'), Markup('<path class="band" d="M{}Z"/>')
    parts = []
    for drawn, run in groupby(line.points, key=lambda p: y.draws(p.low) and y.draws(p.high)):
        ends = [(x(p.x), y(p.low), y(p.high)) for p in run if drawn and p.low is not None and p.high is not None]
        if any(low != high for _, low, high in ends):
            there_and_back = [(at, high) for at, _, high in ends] + [(at, low) for at, low, _ in reversed(ends)]
            parts.append(band.format("L".join(f"{at:.1f} {height:.1f}" for at, height in there_and_back)))
    for drawn, run in groupby(line.points, key=lambda p: y.draws(p.mean)):
        places = [f"{x(p.x):.1f},{y(p.mean):.1f}" for p in run if drawn and p.mean is not None]
        if places:
            parts.append(shape.format(dashed, " ".join(places if len(places) > 1 else places * 2)))
    return Markup("<g {}>{}</g>").format(look(line.arm), joined(parts))


def _columns(lines: Sequence[Line], places: Sequence[float], x: Scale, unit: str, x_name: str) -> list[Markup]:
    """Columns to point at, each with the values of every line there, and their bands where there are few lines."""
    edges = [LEFT, *((x(a) + x(b)) / 2 for a, b in pairwise(places)), WIDTH - RIGHT]
    box = '<g class="hit"><rect x="{:.1f}" y="{}" width="{:.1f}" height="{}"/><path d="M{:.1f} {}V{}"/><title>{}</title></g>'
    at = [(line.name, {p.x: p for p in line.points}) for line in lines]
    columns = []
    for place, left, right in zip(places, edges, edges[1:], strict=False):
        rows = [f"{x_name} {number(place)}"]
        for name, p in ((name, points[place]) for name, points in at if place in points):
            banded = len(lines) <= FEW and finite(p.low) and finite(p.high) and p.low < p.high
            band = f" ({amount(p.low, unit)} to {amount(p.high, unit)})" if banded else ""
            rows.append(f"{name}: {amount(p.mean, unit)}{band}")
        ends = (left, TOP, right - left, HEIGHT - TOP - BOTTOM, x(place), TOP, HEIGHT - BOTTOM)
        columns.append(Markup(box).format(*ends, "\n".join(rows)))
    return columns


# ---- forest rows


def families(comparisons: Sequence[ComparisonResult]) -> list[tuple[str, list[ComparisonResult]]]:
    """Comparisons that can share an axis, the primary one's first and each with the primary one first.

    Points go with points. Other units do not say enough: a loss and a length are both plain numbers, so those are kept
    apart by endpoint.
    """
    found: dict[tuple[str, str], list[ComparisonResult]] = {}
    for c in sorted(comparisons, key=lambda c: not c.primary):
        key = (c.unit, "" if c.unit == "points" else c.endpoint)
        found.setdefault(key, []).append(c)
    return [(f"{endpoint}, {unit}".strip(", "), members) for (unit, endpoint), members in found.items()]


def forest_scale(comparisons: Iterable[ComparisonResult]) -> Scale:
    """One axis for these comparisons; zero is on it, and so is every interval and every zone."""
    values = [0.0]
    for c in comparisons:
        ends = known([c.difference, c.ci_low, c.ci_high, *(s.value for s in c.per_seed), c.detectable])
        values += [c.scale * v for v in ends] + ([-c.scale * c.detectable] if finite(c.detectable) else [])
    return Scale.over(values if len(values) > 1 else [-1.0, 1.0], 2.0, 98.0)


def forest_row(c: ComparisonResult, x: Scale) -> Markup:
    line = Markup('<rect class="{}" x="{:.2f}%"/>')
    parts = [*(line.format("", x(t)) for t in x.ticks(6) if t), line.format("zero", x(0.0))]
    texts = [told(c)]
    if finite(c.detectable):
        low, high = x(-c.detectable * c.scale), x(c.detectable * c.scale)
        parts.append(Markup('<rect class="zone" x="{:.2f}%" width="{:.2f}%"/>').format(low, high - low))
        texts.append(f"smallest detectable: {signed(c.detectable, c.scale, c.unit).lstrip('+')} {c.unit}")
    dot = Markup('<circle cx="{:.1f}%"/>')
    parts += [dot.format(x(s.value * c.scale)) for s in c.per_seed if finite(s.value)]
    if c.per_seed:
        texts.append("by seed: " + ", ".join(signed(s.value, c.scale, c.unit) for s in c.per_seed))
    if finite(c.ci_low) and finite(c.ci_high):
        low, high = x(c.ci_low * c.scale), x(c.ci_high * c.scale)
        parts.append(Markup('<line class="ci" x1="{:.2f}%" x2="{:.2f}%" y1="44%" y2="44%"/>').format(low, high))
        parts += [line.format("cap", end) for end in (low, high)]
    if finite(c.difference):
        shape = "M0-7L6 0L0 7L-6 0Z" if c.primary else "M-4.5-4.5H4.5V4.5H-4.5Z"
        mark = '<svg class="pin" x="{:.2f}%" y="44%"><path class="estimate" d="{}"/></svg>'
        parts.append(Markup(mark).format(x(c.difference * c.scale), shape))
    kind = {"shown": "shown", "not shown": "unshown"}.get(c.verdict, "nothing")
    svg = '<svg class="forest {}" role="img" aria-label="{}, {}">{}</svg>'
    return Markup(svg).format(kind, told(c), c.verdict, joined([*parts, _hit("\n".join(texts))]))


def told(c: ComparisonResult) -> str:
    return f"{with_interval(c.difference, c.ci_low, c.ci_high, c.scale, c.unit)} {c.unit}".strip()


def forest_axis(x: Scale, unit: str) -> Markup:
    text = Markup('<text x="{:.2f}%" y="12">{}</text>')
    marks = joined(text.format(x(t), ("+" if t > 0 else "") + tick(t)) for t in x.ticks(6))
    return Markup('<svg class="forest-axis" role="img" aria-label="axis in {}">{}</svg>').format(unit or "units", marks)


# ---- strips of seeds


def seed_scale(scores: Iterable[ArmScore]) -> Scale:
    """One scale for all scores of an endpoint."""
    values = [v for s in scores for v in (s.mean, s.ci_low, s.ci_high, s.first, *(p.value for p in s.per_seed))]
    return Scale.over(values, 3.0, 97.0)


def seed_strip(score: ArmScore, arm: int, x: Scale) -> Markup:
    """A score: its interval, its mean, the score before training, and a dot for every seed."""
    line = Markup('<line class="{}" x1="{:.1f}%" x2="{:.1f}%" y1="{}" y2="{}"/>')
    parts = [line.format("base", 3, 97, 19, 19)]
    if finite(score.ci_low) and finite(score.ci_high):
        parts.append(line.format("ci", x(score.ci_low), x(score.ci_high), 19, 19))
    parts += [line.format(kind, x(v), x(v), 14, 24) for kind, v in (("before", score.first), ("mean", score.mean)) if finite(v)]
    parts += [Markup('<circle cx="{:.1f}%" cy="11"/>').format(x(p.value)) for p in score.per_seed if finite(p.value)]
    texts = [f"seed {p.seed}: {amount(p.value, score.unit)}" for p in score.per_seed]
    texts += [f"before training: {amount(score.first, score.unit)}"] if finite(score.first) else []
    label = f"mean {amount(score.mean, score.unit)}; " + "; ".join(texts)
    svg = '<svg class="seeds" role="img" aria-label="{}"><g {}>{}</g></svg>'
    return Markup(svg).format(label, look(arm), joined([*parts, _hit("\n".join(texts) or "no seed")]))


# ---- heat rows

SHADES = 10


@dataclass(frozen=True)
class HeatmapRow:
    """A named strip and the ends of its values."""

    name: str
    svg: Markup
    low: str = ""
    high: str = ""


def shades(values: Sequence[Any]) -> Scale:
    """One shading for these values, logarithmic when they are positive and spread more than thirty-fold."""
    return Scale.over(values, 0.0, SHADES - 1e-6, log=needs_log(values, 30.0), margin=0.0)


def value_row(name: str, layers: Sequence[int], values: Sequence[Any], scale: Scale) -> HeatmapRow:
    classes: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        classes.setdefault(f"q{int(scale(value))}" if scale.draws(value) else "none", []).append(i)
    path = Markup('<path class="{}" d="{}"/>')
    paths = joined(path.format(kind, "".join(f"M{i} 0h1" for i in classes[kind])) for kind in sorted(classes))
    seen = known(values)
    low, high = (number(end(seen)) if seen else "–" for end in (min, max))
    label = f"{name} over {len(layers)} layers, from {low} to {high}"
    told = [f"{layer}: {number(value)}" for layer, value in zip(layers, values, strict=True)]
    head = '<svg class="row heat" viewBox="0 -.5 {} 1" preserveAspectRatio="none" role="img" aria-label="{}" data-name="{}">'
    svg = Markup(head + "{}<title>{}\n{}</title></svg>").format(len(layers), label, name, paths, name, "; ".join(told))
    return HeatmapRow(name, svg, low, high)


def layer_axis(layers: Sequence[int], marked: Sequence[int | None] = ()) -> Markup:
    """Numbers of layers under the rows; a marked layer has a triangle."""
    every = max(1, -(-len(layers) // 10))
    text = Markup('<text class="{}" x="{:.2f}%" y="12">{}</text>')
    place = {layer: 100 * (i + 0.5) / len(layers) for i, layer in enumerate(layers)}
    signs = [text.format("blamed", place[n], f"▲{n}") for n in marked if n in place]
    free = [n for n in layers[::every] if all(abs(place[n] - place[m]) > 4 for m in marked if m in place)]
    label = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
    names = [text.format("", place[n], n) for n in free]
    return Markup('<svg class="row-axis" role="img" aria-label="{}">{}</svg>').format(label, joined(names + signs))

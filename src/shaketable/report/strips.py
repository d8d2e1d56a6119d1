"""Strips as wide as their column, as inline SVG: differences with intervals, layers, measured against asked, seeds.

Every x is a percentage, so that text and dots keep their size on a phone.

**Forest rows.** The shaded zone around zero is what the comparison could not have seen: differences smaller than the smallest
detectable one. An interval inside of the zone says "small, if anything"; one that leaves it on both sides says "too few data".
The zone keeps "not shown" from being read as "equal". Dots are seeds.

**Heat rows.** Ten shades of one colour whose opacity rises with the value, so that a row reads the same in the dark and on
paper; a cell without a value is striped. Cells of one shade are one path: a page may have tens of thousands of cells. Rows of
the same quantity share the scale, which is logarithmic when the values are positive and spread more than thirty-fold.

**Proof.** Places of one fault, one verdict and one remark are a row. The ratio of measured to asked is drawn on a log scale
from a half to twice: the dot belongs on the middle line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from shaketable.report.figures import Scale, joined, look, needs_log, tick
from shaketable.report.wording import MARKS, amount, finite, known, number, ranges, signed, spans
from shaketable.study.analysis.results import ArmScore, ComparisonResult, Proof

# ---- forest rows


def axis_of(comparisons: Iterable[ComparisonResult]) -> Scale:
    """One axis for these comparisons; zero is on it, and so is every interval and every zone."""
    values: list[float] = [0.0]
    for c in comparisons:
        ends = known([c.difference, c.ci_low, c.ci_high, *(s.value for s in c.per_seed)])
        values += ends + ([c.detectable, -c.detectable] if finite(c.detectable) else [])
    scaled = [v * _factor(comparisons) for v in values]
    return Scale.over(scaled if len(scaled) > 1 else [-1.0, 1.0], 2.0, 98.0)


def _factor(comparisons: Iterable[ComparisonResult]) -> float:
    return next((float(c.scale) for c in comparisons), 1.0)


def forest_row(c: ComparisonResult, x: Scale) -> Markup:
    """One comparison as a strip."""
    scale = float(c.scale)
    parts = [_rules(x), _zone(c, x, scale), _seeds(c, x, scale), _interval(c, x, scale), _hit(c)]
    label = f"{told(c)}, {c.verdict}"
    return Markup('<svg class="forest {}" role="img" aria-label="{}">{}</svg>').format(state(c), label, joined(parts))


def state(c: ComparisonResult) -> str:
    """The verdict as a class."""
    return {"shown": "shown", "not shown": "unshown"}.get(str(c.verdict), "nothing")


def told(c: ComparisonResult) -> str:
    """+1.8 (−0.4 to +4.1) points."""
    ends = (signed(getattr(c, key), c.scale, c.unit) for key in ("difference", "ci_low", "ci_high"))
    return "{} ({} to {}) {}".format(*ends, c.unit).strip()


def forest_axis(x: Scale, unit: str) -> Markup:
    """The numbers under the rows."""
    text = Markup('<text x="{:.2f}%" y="12">{}</text>')
    ticks = x.ticks(6)
    marks = [text.format(x(t), ("+" if t > 0 else "") + tick(t)) for t in ticks]
    return Markup('<svg class="forest-axis" role="img" aria-label="axis in {}">{}</svg>').format(unit or "units", joined(marks))


def _rules(x: Scale) -> Markup:
    """Upright lines, as boxes whose height and width the style sheet knows: the page has hundreds of rows."""
    lines = [Markup('<rect x="{:.2f}%"/>').format(x(t)) for t in x.ticks(6) if t]
    return joined([*lines, Markup('<rect class="zero" x="{:.2f}%"/>').format(x(0.0))])


def _zone(c: ComparisonResult, x: Scale, scale: float) -> Markup:
    if not finite(c.detectable):
        return Markup("")
    low, high = x(-abs(c.detectable) * scale), x(abs(c.detectable) * scale)
    zone = '<rect class="zone" x="{:.2f}%" width="{:.2f}%"/>'
    return Markup(zone).format(low, high - low)


def _seeds(c: ComparisonResult, x: Scale, scale: float) -> Markup:
    dot = Markup('<circle cx="{:.1f}%"/>')
    return joined(dot.format(x(s.value * scale)) for s in c.per_seed if finite(s.value))


def _interval(c: ComparisonResult, x: Scale, scale: float) -> Markup:
    parts = []
    if finite(c.ci_low) and finite(c.ci_high):
        low, high = x(c.ci_low * scale), x(c.ci_high * scale)
        parts.append(Markup('<line class="ci" x1="{:.2f}%" x2="{:.2f}%" y1="44%" y2="44%"/>').format(low, high))
        parts += [Markup('<rect class="cap" x="{:.2f}%"/>').format(end) for end in (low, high)]
    if finite(c.difference):
        shape = "M0-7L6 0L0 7L-6 0Z" if c.primary else "M-4.5-4.5H4.5V4.5H-4.5Z"
        mark = '<svg class="pin" x="{:.2f}%" y="44%"><path class="estimate" d="{}"/></svg>'
        parts.append(Markup(mark).format(x(c.difference * scale), shape))
    return joined(parts)


def _hit(c: ComparisonResult) -> Markup:
    values = [signed(s.value, c.scale, c.unit) for s in c.per_seed]
    seeds = ["by seed: " + ", ".join(values)] if values else []
    zone = [f"smallest detectable: {signed(c.detectable, c.scale, c.unit).lstrip('+')} {c.unit}"]
    text = "\n".join([told(c), *(zone if finite(c.detectable) else []), *seeds])
    return Markup('<g class="hit"><rect/><title>{}</title></g>').format(text)


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


# ---- heat rows


SHADES = 10


@dataclass(frozen=True)
class HeatmapRow:
    """A named strip and the ends of its values."""

    name: str
    svg: Markup
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class Shading:
    """How values become classes."""

    scale: Scale
    log: bool
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[Any]) -> Shading:
        """One shading for these values."""
        seen, log = known(values), needs_log(values, 30.0)
        scale = Scale.over(seen, 0.0, SHADES - 1e-6, log=log, margin=0.0)
        return cls(scale, log, min(seen, default=None), max(seen, default=None))

    def shade(self, value: Any) -> int | None:
        """0 to 9, or None where there is no value."""
        return int(self.scale(value)) if self.scale.draws(value) else None


def value_row(name: str, layers: Sequence[int], values: Sequence[Any], shading: Shading) -> HeatmapRow:
    """A row of shades."""
    classes: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        shade = shading.shade(value)
        classes.setdefault("none" if shade is None else f"q{shade}", []).append(i)
    paths = [Markup('<path class="{}" d="{}"/>').format(name, _cells(at)) for name, at in sorted(classes.items())]
    seen = known(values)
    low, high = (number(end(seen)) if seen else "–" for end in (min, max))
    label = f"{name} over {len(layers)} layers, from {low} to {high}"
    told = [f"{layer}: {number(value)}" for layer, value in zip(layers, values, strict=True)]
    return HeatmapRow(name, _strip(label, name, told, joined(paths)), low, high)


def status_row(name: str, layers: Sequence[int], results: Sequence[str | None]) -> HeatmapRow:
    """A row of results; whatever is not a pass carries its mark."""
    width = 100 / max(len(layers), 1)
    cell = Markup('<rect class="s-{}" x="{:.3f}%" width="{:.3f}%" height="100%"/>')
    sign = Markup('<text class="s-{}" x="{:.2f}%" y="14">{}</text>')
    states = [r if r in MARKS else "absent" for r in (str(r) for r in results)]
    cells = [cell.format(s, i * width, width * 0.94) for i, s in enumerate(states) if s != "absent"]
    marked = [(i, s) for i, s in enumerate(states) if s not in ("pass", "absent", "skipped")]
    signs = [sign.format(s, (i + 0.5) * width, MARKS[s]) for i, s in marked]
    odd = [f"{states[i]} at layer {layers[i]}" for i, _ in marked]
    label = f"{name} over {len(layers)} layers: " + ("; ".join(odd) or "no layer stands out")
    told = [f"{layer}: {state}" for layer, state in zip(layers, states, strict=True)]
    frame = '<svg class="row status" role="img" aria-label="{}" data-name="{}">{}<title>{}</title></svg>'
    return HeatmapRow(name, Markup(frame).format(label, name, joined(cells + signs), _title(name, told)))


def bar_row(name: str, layers: Sequence[int], values: Sequence[Any], words: Sequence[str]) -> HeatmapRow:
    """A row of bars from zero: the σ that a diagnosis was made into."""
    top = max(known(values), default=0.0) or 1.0
    width = 100 / max(len(layers), 1)
    bar = Markup('<rect class="bar" x="{:.3f}%" width="{:.3f}%" y="{:.1f}%" height="{:.1f}%"/>')
    heights = [(i, 92 * max(v, 0.0) / top) for i, v in enumerate(values) if known([v])]
    bars = [bar.format(i * width, width * 0.9, 100 - h, h) for i, h in heights]
    told = [f"{n}: {number(v)} {word}".rstrip() for n, v, word in zip(layers, values, words, strict=True)]
    label = f"{name} by layer: " + "; ".join(told)
    frame = '<svg class="row tall" role="img" aria-label="{}" data-name="{}">{}<title>{}</title></svg>'
    return HeatmapRow(name, Markup(frame).format(label, name, joined(bars), _title(name, told)), "0", number(top))


def layer_axis(layers: Sequence[int], marked: Sequence[int] = ()) -> Markup:
    """Numbers of layers under the rows; a marked layer has a triangle."""
    every = max(1, -(-len(layers) // 10))
    text = Markup('<text class="{}" x="{:.2f}%" y="12">{}</text>')
    place = {layer: 100 * (i + 0.5) / len(layers) for i, layer in enumerate(layers)}
    near = 100 / 26
    signs = [text.format("blamed", place[n], f"▲{n}") for n in marked if n in place]
    taken = [place[n] for n in marked if n in place]
    plain = [n for n in layers[::every] if all(abs(place[n] - t) > near for t in taken)]
    label = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
    names = [text.format("", place[n], n) for n in plain]
    return Markup('<svg class="row-axis" role="img" aria-label="{}">{}</svg>').format(label, joined(names + signs))


def _cells(at: Sequence[int]) -> str:
    return "".join(f"M{first} 0h{last - first + 1}" for first, last in spans(at))


def _strip(label: str, name: str, told: Sequence[str], body: Markup) -> Markup:
    frame = (
        '<svg class="row heat" viewBox="0 -.5 {} 1" preserveAspectRatio="none" role="img" aria-label="{}" data-name="{}">'
        "{}<title>{}</title></svg>"
    )
    return Markup(frame).format(max(len(told), 1), label, name, body, _title(name, told))


def _title(name: str, told: Sequence[str]) -> str:
    """What the row says when pointed at: all of its cells. The page's script shows the one under the pointer."""
    return name + "\n" + "; ".join(told)


# ---- proof


PROOF_MARKS = {"agrees": "✓", "proven": "✓", "differs": "▲", "inert": "✕"}
STATES = {"agrees": "pass", "proven": "pass", "differs": "suspect", "inert": "fail"}
MEANING = {
    "agrees": "measured as asked",
    "proven": "values changed; this fault has no magnitude to compare",
    "differs": "values changed, but not as strongly as asked",
    "inert": "nothing changed",
}
RATIO = Scale(0.5, 2.0, 2.0, 98.0, log=True)


@dataclass(frozen=True)
class ProofRow:
    """Places that say the same, for a table."""

    where: str
    fault: str
    verdict: str
    remark: str | None
    site: str
    mark: str
    state: str
    asked: str
    measured: str
    error: str
    changed: str
    forward: int | None
    backward: int | None
    svg: Markup


def proof_rows(places: Sequence[Proof]) -> list[ProofRow]:
    """Places that say the same as one row; what is wrong comes first."""
    groups: dict[tuple[Any, ...], list[Proof]] = {}
    for place in places:
        groups.setdefault((place.where, place.fault, place.verdict, place.remark), []).append(place)
    order = {"inert": 0, "differs": 1}
    return sorted((_proof_row(members) for members in groups.values()), key=lambda row: order.get(row.verdict, 2))


def _proof_row(places: Sequence[Proof]) -> ProofRow:
    first = places[0]
    return ProofRow(
        where=first.where,
        fault=first.fault,
        verdict=first.verdict,
        remark=first.remark,
        site=sites([p.site for p in places]),
        mark=PROOF_MARKS.get(first.verdict, "?"),
        state=STATES.get(first.verdict, "inconclusive"),
        asked=extent([p.asked for p in places]),
        measured=extent([p.measured for p in places]),
        error=extent([p.error for p in places]),
        changed=extent([100 * p.changed for p in places if finite(p.changed)]) + _survival(places),
        forward=total(p.forward for p in places),
        backward=total(p.backward for p in places),
        svg=ratio_strip(places),
    )


def _survival(places: Sequence[Proof]) -> str:
    """Of what was not 0 before a dead zone, the share in per cent that is not 0 behind it; nothing for other faults."""
    shares = [100 * p.survival for p in places if p.fault.startswith("dead_zone") and finite(p.survival)]
    return f" ({extent(shares)} survive)" if shares else ""


def ratio_strip(places: Sequence[Proof]) -> Markup:
    """Measured over asked; nothing where one of them is not known."""
    pairs = [(p.measured, p.asked) for p in places if finite(p.measured) and finite(p.asked) and p.asked > 0]
    if not pairs:
        return Markup("")
    ratios = [measured / asked for measured, asked in pairs]
    low, high = RATIO(min(ratios)), RATIO(max(ratios))
    span = Markup('<line class="ci" x1="{:.1f}%" x2="{:.1f}%" y1="9" y2="9"/>').format(low, high)
    dots = [Markup('<circle cx="{:.1f}%" cy="9"/>').format(at) for at in sorted({low, high})]
    label = f"measured over asked: {extent(ratios)}"
    hit = Markup('<g class="hit"><rect/><title>{}</title></g>').format(label)
    frame = '<svg class="ratio" role="img" aria-label="{}">{}</svg>'
    return Markup(frame).format(label, joined([span, *dots, hit]))


def sites(names: Sequence[str]) -> str:
    """`layer.0–7` for many layers; the first few of other names and their number."""
    unique = list(dict.fromkeys(names))
    layers = [re.fullmatch(r"layer\.(\d+)", name) for name in unique]
    numbers = [int(m[1]) for m in layers if m]
    if len(unique) > 1 and len(numbers) == len(unique):
        return "layer." + ranges(numbers, 6)
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


def extent(values: Sequence[Any]) -> str:
    """0.05, or 0.049 … 0.051 where values differ."""
    seen = known(values)
    if not seen:
        return "–"
    low, high = number(min(seen)), number(max(seen))
    return low if low == high else f"{low} … {high}"


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of those that are known."""
    seen = [count for count in counts if count is not None]
    return sum(seen) if seen else None


# ---- seeds


def scale_of(scores: Iterable[ArmScore]) -> Scale:
    """One scale for all scores of an endpoint."""
    ends = [getattr(s, k) for s in scores for k in ("mean", "ci_low", "ci_high", "first")]
    return Scale.over([*ends, *(p.value for s in scores for p in s.per_seed)], 3.0, 97.0)


def seed_strip(score: ArmScore, arm: int, x: Scale) -> Markup:
    """One cell's strip."""
    unit = score.unit
    values = [amount(p.value, unit) for p in score.per_seed]
    seeds = [f"seed {p.seed}: {value}" for p, value in zip(score.per_seed, values, strict=True)]
    start = [f"before training: {amount(score.first, unit)}"] if finite(score.first) else []
    label = f"mean {amount(score.mean, unit)}; by seed {', '.join(values) or 'none'}" + "".join(f"; {s}" for s in start)
    hit = Markup('<g class="hit"><rect/><title>{}</title></g>')
    body = joined([_spread(score, x), _dots(score, x), hit.format("\n".join([*seeds, *start]) or "no seed")])
    frame = '<svg class="seeds" role="img" aria-label="{}"><g {}>{}</g></svg>'
    return Markup(frame).format(label, look(arm), body)


def _spread(score: ArmScore, x: Scale) -> Markup:
    parts = [Markup('<line class="base" x1="3%" x2="97%" y1="19" y2="19"/>')]
    if finite(score.ci_low) and finite(score.ci_high):
        box = '<line class="ci" x1="{:.1f}%" x2="{:.1f}%" y1="19" y2="19"/>'
        parts.append(Markup(box).format(x(score.ci_low), x(score.ci_high)))
    for key, kind in (("first", "before"), ("mean", "mean")):
        if finite(getattr(score, key)):
            tick = '<line class="{}" x1="{:.1f}%" x2="{:.1f}%" y1="14" y2="24"/>'
            parts.append(Markup(tick).format(kind, x(getattr(score, key)), x(getattr(score, key))))
    return joined(parts)


def _dots(score: ArmScore, x: Scale) -> Markup:
    piled: Counter[int] = Counter()
    dots = []
    for point in score.per_seed:
        if finite(point.value):
            place = x(point.value)
            height = piled[round(place / 4)]
            piled[round(place / 4)] += 1
            dots.append(Markup('<circle cx="{:.1f}%" cy="{}"/>').format(place, 11 - 3 * min(height, 3)))
    return joined(dots)

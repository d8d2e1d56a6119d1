"""Rows over layers: statistics of a diagnosis, results of its probes, what happens inside of each arm.

A row is one strip of cells, as wide as its column: 8 layers or 80. Shades are ten classes of one colour whose opacity rises
with the value, so a row reads the same in the dark, on paper and without colours; a cell that has no value is
striped. Cells of one class are one path (`M12 0h1` is a cell): a study of twelve arms and eighty layers
has tens of thousands of cells, and a `<rect>` each would be the largest part of the page.

Rows that mean the same quantity share the scale and can be compared; the scale is logarithmic when the values are positive
and spread over more than thirty-fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import MARKS, number, spans
from shaketable.report.svg.scale import Scale, joined, known, needs_log

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

"""The page of a diagnosis: one HTML file that explains a verdict to the person who has to act on it.

The page is made from the JSON of a diagnosis and from nothing else, so it can be drawn again on any machine; no torch is
imported. It loads nothing either: style and script are inline, the drawings are inline SVG, and a content policy in its
head forbids the browser to fetch anything. With JavaScript off only the shared cursor of the curves is lost.

A plotting library was rejected: six curves with a few dozen points do not pay for megabytes of script, and a drawing
made of CSS variables follows light, dark and paper by itself. Every value reaches the page through an escaping template
or `Markup.format`, which escapes too. A curve is labelled with its own least and greatest value, not with round numbers
around them: the range is a fact of the data. Values that are not finite (or have no logarithm) interrupt the curve and
leave a cross on its axis: a missing number must not look like a small one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shaketable.report.wording import MARKS, PROBES, STATUS_OF, finite, number, ranges

MEANING = {
    "fail": "exact evidence of a fault",
    "suspect": "a test with a tolerance fired",
    "inconclusive": "the probe could not tell",
    "skipped": "not needed",
    "pass": "nothing wrong",
    "absent": "not run here",
}
JUDGED_BY = {
    "replayed": "replayed",
    "checksums": "by checksums alone",
    "agreed": "the host's same bits",
    "twin": "compared with a twin",
}
STATISTICS = {
    "gain": "answer to a small random change, per unit",
    "min_gain": "the same for the channels that answer least",
    "kurtosis": "excess, on a log scale of kurtosis + 3",
    "instability": "spread over repeats, relative to the output",
    "pile_up": "share of values at the least or the greatest",
    "distinct": "number of different values",
    "drop_z": "z of the change of the kurtosis from the layer before",
}
LOG_ORIGIN = {"kurtosis": -3.0}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 148, 54, 10, 26, 22
BINS = 400


def page(diagnosis: dict[str, Any]) -> str:
    """The self-contained HTML page of a diagnosis (the object that `shaketable locate --json` writes)."""
    layers = [row for row in diagnosis["probes"] if row["layer"] is not None]
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "exact": exact, "score": score, "day": day, "ranges": ranges}
    return environment.get_template("locate.html.jinja").render(
        d=diagnosis,
        status=STATUS_OF[diagnosis["verdict"]],
        says=_says(diagnosis),
        marks=MARKS,
        meaning=MEANING,
        probes=_probes_run(diagnosis["probes"]),
        not_run=[p for p in PROBES if p not in _probes_run(diagnosis["probes"])],
        reasons=reasons(diagnosis["probes"]),
        place=place,
        counts=Counter(result["status"] for row in diagnosis["probes"] for result in row["results"].values()),
        evidence=[item | {"columns": _columns(item)} for item in diagnosis["evidence"]],
        judged_by=JUDGED_BY,
        covered=covered(diagnosis["probes"]),
        foreign=diagnosis.get("foreign") or [],
        outside=_outside,
        shade=shade,
        tile=tile_width(diagnosis["lanes_of"] or 1),
        bins=BINS,
        strip=lane_strip(diagnosis["lanes"] or [], diagnosis["lanes_of"] or 0),
        curves=_curves(layers, diagnosis),
        statistics=[name for name in STATISTICS if any(name in (row["statistics"] or {}) for row in layers)],
        layers=layers,
        longest=max([c for c in diagnosis["cost"].values() if finite(c)], default=0.0) or 1.0,
    )


def score(value: Any) -> str:
    """A number for a cell of the map: two decimals where they suffice, so that a column lines up."""
    if value is None:
        return ""
    return f"{value:.2f}" if finite(value) and 0.01 <= value < 10 else number(value, 2)


def exact(value: Any) -> str:
    """Nine digits: enough to tell two neighbouring float32 apart."""
    return number(value, 9)


def day(date: str) -> str:
    """An ISO date in UTC, to the minute."""
    return datetime.fromisoformat(date).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _says(diagnosis: dict[str, Any]) -> str:
    """The sentence without the verdict, which stands above it. It starts with a capital, unless with the name of an op."""
    text = str(diagnosis["sentence"]).removeprefix(f"{diagnosis['verdict']}: ")
    return text if text.startswith(diagnosis["op"] or " ") else text[:1].upper() + text[1:]


def place(item: dict[str, Any]) -> list[str]:
    """Where something is, from the outside in: layer, op, function."""
    layer, op, function = item["layer"], item.get("op"), item.get("function")
    head = "outside of the layers" if layer is None else f"layer {layer}"
    own = " ".join(part for part in (function, f"after {item['after']}" if item.get("after") else None) if part)
    return [head, *([op] if op else []), *([own] if own else [])]


def covered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was judged of each operator, over all layers: those of which not every row was replayed, and how many others."""
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        for op, counts in (row.get("coverage") or {}).items():
            sums.setdefault(op, Counter()).update({"places": 1, **counts})
    some = {op: counts for op, counts in sums.items() if counts["replayed"] < counts["rows"]}
    names = [name for name in JUDGED_BY if any(c[name] for c in some.values())]
    return {"some": some, "whole": len(sums) - len(some), "names": names}


def reasons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that are not a pass, with layers of the same reason in one line; the most telling first."""
    found: dict[tuple[str, str, str | None, str], list[int | None]] = {}
    for row in rows:
        for probe, result in row["results"].items():
            if result["status"] != "pass":
                key = (result["status"], probe, result["op"], result["reason"])
                found.setdefault(key, []).append(row["layer"])
    order = list(MARKS)
    lines = [dict(zip(("status", "probe", "op", "reason"), key, strict=True), where=_where(at)) for key, at in found.items()]
    return sorted(lines, key=lambda line: order.index(line["status"]))


def _where(layers: list[int | None]) -> str:
    inside = [layer for layer in layers if layer is not None]
    words = [("layers " if len(inside) > 1 else "layer ") + ranges(inside, 8)] if inside else []
    return " and ".join([*words, *(["outside of the layers"] if None in layers else [])])


def _probes_run(rows: list[dict[str, Any]]) -> list[str]:
    seen = {probe for row in rows for probe in row["results"]}
    return [*(p for p in PROBES if p in seen), *sorted(seen.difference(PROBES))]


def _columns(item: dict[str, Any]) -> list[str]:
    """The keys of the examples, in order of appearance: probes have more to show than token and channel."""
    return list(dict.fromkeys(key for example in item["examples"] for key in example))


def _outside(example: dict[str, Any]) -> str:
    """How far a value lies outside of its interval, and on which side."""
    got, low, high = (example.get(key) for key in ("got", "low", "high"))
    if low is None or high is None or got is None:
        return "–"
    if low <= got <= high:
        return "inside"
    if not got < low and not got > high:
        return "not a number"
    return f"▼ {number(low - got, 4)} below" if got < low else f"▲ {number(got - high, 4)} above"


def shade(score: Any) -> str:
    """How warm the cell of a pass is, 0 to 1: a score near its tolerance should be seen before it fires."""
    return f"{min(max(float(score), 0.0), 1.0):.2f}" if finite(score) else "0"


def lane_strip(lanes: Sequence[int], of: int) -> Markup:
    """All channels side by side, the faulty ones marked. Wide layers are drawn in bins, paler where few lanes of one are."""
    if not lanes or not of:
        return Markup("")
    bins = min(of, BINS)
    held, size = (Counter(n * bins // of for n in numbers) for numbers in (lanes, range(of)))
    bar = Markup('<rect class="lane" x="{:.2f}" y="0" width="{:.2f}" height="34" opacity="{:.2f}"/>')
    bars = [bar.format(1000 * n / bins, 1000 / bins, 0.45 + 0.55 * held[n] / size[n]) for n in sorted(held)]
    tile = Markup('<path class="tile" d="M{:.2f} 0V34"/>')
    tiles = [tile.format(1000 * n / of) for n in range(tile_width(of), of, tile_width(of))]
    label = f"{len(lanes):,} of {of:,} channels marked as faulty: {ranges(lanes, 12)}"
    frame = '<svg class="strip" viewBox="0 0 1000 34" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    return Markup(frame).format(label, Markup("").join(bars + tiles))


def tile_width(of: int) -> int:
    """The power of two that cuts the channels into at most 16 pieces: hardware faults like to repeat with one."""
    return 1 << max(0, math.ceil(math.log2(of / 16)))


def _curves(layers: list[dict[str, Any]], diagnosis: dict[str, Any]) -> list[dict[str, Any]]:
    marks = {
        "verdict": diagnosis["layer"] if diagnosis["verdict"] == "FAULT" else None,
        "srdd": (diagnosis["srdd"] or {}).get("blames"),
    }
    focus = next((layer for layer in marks.values() if layer is not None), None)
    found = []
    for name, meaning in STATISTICS.items():
        points = [(row["layer"], (row["statistics"] or {}).get(name)) for row in layers]
        if any(value is not None for _, value in points):
            readout = "" if focus is None else f"layer {focus}: {number(dict(points).get(focus))}"
            svg = curve(name, points, marks, LOG_ORIGIN.get(name))
            found.append({"name": name, "meaning": meaning, "readout": readout, "svg": svg, "gaps": 'class="gap"' in svg})
    return found


def curve(name: str, points: list[tuple[int, Any]], marks: dict[str, int | None], log_from: float | None = None) -> Markup:
    """One statistic over the layers: line, dots, the layers that are marked, and a column per layer to hover on.

    Args:
        name: Of the statistic.
        points: (layer, value).
        marks: The layers of "verdict" and "srdd".
        log_from: Makes the scale the logarithm of the value less this; None is a linear scale.
    """
    xs = {layer: LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(points) for i, (layer, _) in enumerate(points)}
    drawable = {layer: float(v) for layer, v in points if finite(v) and (log_from is None or v > log_from)}
    heights = _heights(drawable, log_from)
    gap = Markup(f'<text class="gap" x="{{:.1f}}" y="{HEIGHT - BOTTOM + 3}">×</text>')
    parts = [
        _axes(points, drawable, heights, xs),
        *(_mark(kind, xs[layer]) for kind, layer in marks.items() if layer in xs),
        *_lines([(xs[layer], heights.get(layer)) for layer, _ in points]),
        *(gap.format(xs[layer]) for layer, _ in points if layer not in heights),
        *_columns_to_hover(points, xs),
    ]
    label = f"{name} over {len(points)} layers{_extent(drawable)}"
    frame = '<svg class="curve" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(frame).format(WIDTH, HEIGHT, label, Markup("").join(parts))


def _extent(drawable: dict[int, float]) -> str:
    if not drawable:
        return ", no value can be drawn"
    low, high = min(drawable, key=drawable.__getitem__), max(drawable, key=drawable.__getitem__)
    return f", from {number(drawable[low])} at layer {low} to {number(drawable[high])} at layer {high}"


def _heights(drawable: dict[int, float], log_from: float | None) -> dict[int, float]:
    """Layer to y. A constant curve runs through the middle."""
    scaled = {layer: v if log_from is None else math.log10(v - log_from) for layer, v in drawable.items()}
    low, high = min(scaled.values(), default=0.0), max(scaled.values(), default=0.0)
    room, floor = HEIGHT - TOP - BOTTOM - 8, HEIGHT - BOTTOM - 6
    return {n: floor - room * ((v - low) / (high - low) if high > low else 0.5) for n, v in scaled.items()}


def _axes(points: list[tuple[int, Any]], drawable: dict[int, float], heights: dict[int, float], xs: dict[int, float]) -> Markup:
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    ends = {heights[n]: number(v) for n, v in drawable.items() if v in (min(drawable.values()), max(drawable.values()))}
    rules = (Markup('<path class="rule" d="M{} {:.1f}H{}"/>').format(LEFT, y, WIDTH - RIGHT) for y in ends)
    values = (text.format("y", LEFT - 6, y + 3.5, label) for y, label in ends.items())
    layers = [text.format("x", xs[points[0][0]], HEIGHT - 7, f"layer {points[0][0]}")]
    layers += [text.format("x", xs[n], HEIGHT - 7, n) for n, _ in points[1:][-1:]]
    axis = Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT)
    return axis + Markup("").join([*rules, *values, *layers])


def _mark(kind: str, x: float) -> Markup:
    sign, y = {"verdict": ("✕", 10), "srdd": ("◇", 21)}[kind]
    line = '<g class="mark {}"><path d="M{:.1f} {}V{}"/><text x="{:.1f}" y="{}">{}</text></g>'
    return Markup(line).format(kind, x, y + 3, HEIGHT - BOTTOM, x, y, sign)


def _lines(points: list[tuple[float, float | None]]) -> list[Markup]:
    runs = [list(run) for known, run in groupby(points, key=lambda p: p[1] is not None) if known]
    paths = [" ".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in runs]
    dot = Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="{}"/>')
    radius = 2.1 if len(points) <= 40 else 1.3
    dots = [dot.format(x, y, radius) for run in runs for x, y in run]
    return [Markup('<polyline class="line" points="{}"/>').format(path) for path in paths] + dots


def _columns_to_hover(points: list[tuple[int, Any]], xs: dict[int, float]) -> list[Markup]:
    width = (WIDTH - LEFT - RIGHT) / len(points)
    column = '<rect class="hit" data-layer="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>layer {}: {}</title></rect>'
    return [Markup(column).format(n, xs[n] - width / 2, TOP, width, HEIGHT - TOP - BOTTOM, n, number(v)) for n, v in points]

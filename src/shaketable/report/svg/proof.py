"""Proof of injection: what was asked of each place and what was measured there, as a strip around "exactly as asked".

A plan on eighty layers has eighty places that say the same; those of one fault, one verdict and one remark become a row,
with the range of what was measured. The ratio of measured to asked is drawn on a log scale from a half to twice: the dot
belongs on the middle line, and a place that is off by more than a factor of two stays visible at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import number, ranges
from shaketable.report.svg.scale import Scale, finite, joined, known

MARKS = {"agrees": "✓", "proven": "✓", "differs": "▲", "inert": "✕"}
STATES = {"agrees": "pass", "proven": "pass", "differs": "suspect", "inert": "fail"}
MEANING = {
    "agrees": "measured as asked",
    "proven": "values changed; this fault has no magnitude to compare",
    "differs": "values changed, but not as strongly as asked",
    "inert": "nothing changed",
}
RATIO = Scale(0.5, 2.0, 2.0, 98.0, log=True)
Place = dict[str, Any]


def proof_rows(places: Sequence[Place]) -> list[dict[str, Any]]:
    """Places that say the same as one row; what is wrong comes first."""
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place in places:
        groups.setdefault((place["where"], place["fault"], place["verdict"], place["remark"]), []).append(place)
    order = ["inert", "differs"]
    rows = [_row(members) for members in groups.values()]
    return sorted(rows, key=lambda row: order.index(row["verdict"]) if row["verdict"] in order else len(order))


def _row(places: Sequence[Place]) -> dict[str, Any]:
    first = places[0]
    return {
        **{key: first[key] for key in ("where", "fault", "verdict", "remark")},
        "places": len(places),
        "site": sites([p["site"] for p in places]),
        "mark": MARKS.get(first["verdict"], "?"),
        "state": STATES.get(first["verdict"], "inconclusive"),
        "means": MEANING.get(first["verdict"], first["verdict"] or "no proof was kept"),
        **{key: extent([p[key] for p in places]) for key in ("asked", "measured", "error")},
        "changed": extent([100 * p["changed"] for p in places if finite(p["changed"])]) + _survival(places),
        "forward": total(p["forward"] for p in places),
        "backward": total(p["backward"] for p in places),
        "svg": ratio_strip(places),
    }


def _survival(places: Sequence[Place]) -> str:
    """Of what was not 0 before a dead zone, the share in per cent that is not 0 behind it; nothing for other faults."""
    shares = [100 * p["survival"] for p in places if p["fault"].startswith("dead_zone") and finite(p["survival"])]
    return f" ({extent(shares)} survive)" if shares else ""


def ratio_strip(places: Sequence[Place]) -> Markup:
    """Measured over asked; nothing where one of them is not known."""
    pairs = [(p["measured"], p["asked"]) for p in places if finite(p["measured"]) and finite(p["asked"]) and p["asked"] > 0]
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


def total(counts: Any) -> float | None:
    """The sum of those that are known."""
    seen = known(counts)
    return sum(seen) if seen else None

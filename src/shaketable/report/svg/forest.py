"""A forest plot: every difference with its interval, on one axis for all that share a unit.

The shaded zone around zero is what the comparison could not have seen: differences smaller than the smallest detectable one.
An interval inside of the zone says "small, if anything"; an interval that leaves it on both sides says "too few data".
Drawing the zone keeps "not shown" from being read as "equal". Dots are the seeds. Rows are strips as wide as their column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from shaketable.report.svg.curves import tick
from shaketable.report.svg.scale import Scale, finite, joined, known, signed

ComparisonFacts = dict[str, Any]


def axis_of(comparisons: Iterable[ComparisonFacts]) -> Scale:
    """One axis for these comparisons; zero is on it, and so is every interval and every zone."""
    values: list[float] = [0.0]
    for c in comparisons:
        ends = known([c["difference"], c["ci_low"], c["ci_high"], *(s["value"] for s in c["per_seed"])])
        values += ends + ([c["detectable"], -c["detectable"]] if finite(c["detectable"]) else [])
    scaled = [v * _factor(comparisons) for v in values]
    return Scale.over(scaled if len(scaled) > 1 else [-1.0, 1.0], 2.0, 98.0)


def _factor(comparisons: Iterable[ComparisonFacts]) -> float:
    return next((float(c["scale"]) for c in comparisons), 1.0)


def forest_row(c: ComparisonFacts, x: Scale) -> Markup:
    """One comparison as a strip."""
    scale = float(c["scale"])
    parts = [_rules(x), _zone(c, x, scale), _seeds(c, x, scale), _interval(c, x, scale), _hit(c)]
    label = f"{told(c)}, {c['verdict']}"
    return Markup('<svg class="forest {}" role="img" aria-label="{}">{}</svg>').format(state(c), label, joined(parts))


def state(c: ComparisonFacts) -> str:
    """The verdict as a class."""
    return {"shown": "shown", "not shown": "unshown"}.get(str(c["verdict"]), "nothing")


def told(c: ComparisonFacts) -> str:
    """+1.8 (−0.4 to +4.1) points."""
    ends = (signed(c[key], c["scale"], c["unit"]) for key in ("difference", "ci_low", "ci_high"))
    return "{} ({} to {}) {}".format(*ends, c["unit"]).strip()


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


def _zone(c: ComparisonFacts, x: Scale, scale: float) -> Markup:
    if not finite(c["detectable"]):
        return Markup("")
    low, high = x(-abs(c["detectable"]) * scale), x(abs(c["detectable"]) * scale)
    zone = '<rect class="zone" x="{:.2f}%" width="{:.2f}%"/>'
    return Markup(zone).format(low, high - low)


def _seeds(c: ComparisonFacts, x: Scale, scale: float) -> Markup:
    dot = Markup('<circle cx="{:.1f}%"/>')
    return joined(dot.format(x(s["value"] * scale)) for s in c["per_seed"] if finite(s["value"]))


def _interval(c: ComparisonFacts, x: Scale, scale: float) -> Markup:
    parts = []
    if finite(c["ci_low"]) and finite(c["ci_high"]):
        low, high = x(c["ci_low"] * scale), x(c["ci_high"] * scale)
        parts.append(Markup('<line class="ci" x1="{:.2f}%" x2="{:.2f}%" y1="44%" y2="44%"/>').format(low, high))
        parts += [Markup('<rect class="cap" x="{:.2f}%"/>').format(end) for end in (low, high)]
    if finite(c["difference"]):
        shape = "M0-7L6 0L0 7L-6 0Z" if c["primary"] else "M-4.5-4.5H4.5V4.5H-4.5Z"
        mark = '<svg class="pin" x="{:.2f}%" y="44%"><path class="estimate" d="{}"/></svg>'
        parts.append(Markup(mark).format(x(c["difference"] * scale), shape))
    return joined(parts)


def _hit(c: ComparisonFacts) -> Markup:
    values = [signed(s["value"], c["scale"], c["unit"]) for s in c["per_seed"]]
    seeds = ["by seed: " + ", ".join(values)] if values else []
    zone = [f"smallest detectable: {signed(c['detectable'], c['scale'], c['unit']).lstrip('+')} {c['unit']}"]
    text = "\n".join([told(c), *(zone if finite(c["detectable"]) else []), *seeds])
    return Markup('<g class="hit"><rect/><title>{}</title></g>').format(text)


def families(comparisons: Sequence[ComparisonFacts]) -> list[tuple[str, list[ComparisonFacts]]]:
    """Comparisons that can share an axis, the primary one's first and each with the primary one first.

    Points go with points. Other units do not say enough: a loss and a length are both plain numbers, so those are kept
    apart by endpoint.
    """
    found: dict[tuple[str, str], list[ComparisonFacts]] = {}
    for c in sorted(comparisons, key=lambda c: not c["primary"]):
        key = (c["unit"], "" if c["unit"] == "points" else c["endpoint"])
        found.setdefault(key, []).append(c)
    return [(f"{endpoint}, {unit}".strip(", "), members) for (unit, endpoint), members in found.items()]

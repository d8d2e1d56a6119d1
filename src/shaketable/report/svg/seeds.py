"""Every seed as a dot, with mean and interval, in a strip as wide as its cell; all cells of a table share the scale.

A mean hides whether one seed made it. Dots that would lie on each other are piled up, so that ten equal seeds look like ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from shaketable.report.svg.scale import Scale, amount, finite, joined
from shaketable.report.svg.style import look

Score = dict[str, Any]


def scale_of(scores: Iterable[Score]) -> Scale:
    """One scale for all scores of an endpoint."""
    ends = [s[k] for s in scores for k in ("mean", "ci_low", "ci_high", "first")]
    return Scale.over([*ends, *(p["value"] for s in scores for p in s["per_seed"])], 3.0, 97.0)


def seed_strip(score: Score, arm: int, x: Scale) -> Markup:
    """One cell's strip."""
    unit = score["unit"]
    values = [amount(p["value"], unit) for p in score["per_seed"]]
    seeds = [f"seed {p['seed']}: {value}" for p, value in zip(score["per_seed"], values, strict=True)]
    start = [f"before training: {amount(score['first'], unit)}"] if finite(score["first"]) else []
    label = f"mean {amount(score['mean'], unit)}; by seed {', '.join(values) or 'none'}" + "".join(f"; {s}" for s in start)
    hit = Markup('<g class="hit"><rect/><title>{}</title></g>')
    body = joined([_spread(score, x), _dots(score, x), hit.format("\n".join([*seeds, *start]) or "no seed")])
    frame = '<svg class="seeds" role="img" aria-label="{}"><g {}>{}</g></svg>'
    return Markup(frame).format(label, look(arm), body)


def _spread(score: Score, x: Scale) -> Markup:
    parts = [Markup('<line class="base" x1="3%" x2="97%" y1="19" y2="19"/>')]
    if finite(score["ci_low"]) and finite(score["ci_high"]):
        box = '<line class="ci" x1="{:.1f}%" x2="{:.1f}%" y1="19" y2="19"/>'
        parts.append(Markup(box).format(x(score["ci_low"]), x(score["ci_high"])))
    for key, kind in (("first", "before"), ("mean", "mean")):
        if finite(score[key]):
            tick = '<line class="{}" x1="{:.1f}%" x2="{:.1f}%" y1="14" y2="24"/>'
            parts.append(Markup(tick).format(kind, x(score[key]), x(score[key])))
    return joined(parts)


def _dots(score: Score, x: Scale) -> Markup:
    piled: Counter[int] = Counter()
    dots = []
    for point in score["per_seed"]:
        if finite(point["value"]):
            place = x(point["value"])
            height = piled[round(place / 4)]
            piled[round(place / 4)] += 1
            dots.append(Markup('<circle cx="{:.1f}%" cy="{}"/>').format(place, 11 - 3 * min(height, 3)))
    return joined(dots)

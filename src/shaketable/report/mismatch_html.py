"""The page of a mismatch: one HTML file that takes the person who has to act from the verdict through the stages.

It loads nothing: style is inline, bars are elements with a width, and a content policy in its head forbids the browser to fetch
anything. Tokens and names come from models and files of others: everything reaches the page through a template that escapes.
"""

from __future__ import annotations

import math

from jinja2 import Environment, PackageLoader, StrictUndefined

from shaketable.mismatch.results import Mismatch
from shaketable.report.mismatch_lines import STAGES, adding_up, lines

STATUS_OF = {"DEFECT": "fail", "LEGAL": "pass", "INCONCLUSIVE": "inconclusive"}


def page(found: Mismatch) -> str:
    """The self-contained HTML page."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "ranges": ranges, "quoted": repr}
    says, _, more = found.sentence.partition(": ")[2].partition(". ")
    text = lines(found)
    return environment.get_template("mismatch.html.jinja").render(
        d=found,
        status=STATUS_OF[found.verdict],
        says=says.rstrip("."),
        more=more,
        stages=[(stage, _status(found, stage), text[stage]) for stage in STAGES],
        scale=max((r.mean_abs for r in found.gap.by_position), default=1.0) or 1.0,
        adding_up=f"In sum, {adding_up(found.shares)}." if found.shares else "",
    )


def number(value: float | None) -> str:
    """Three digits."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.1f} %"


def ranges(lanes: list[int]) -> str:
    """Numbers of lanes as ranges, the first few of them."""
    parts: list[list[int]] = []
    for lane in lanes:
        if parts and lane == parts[-1][1] + 1:
            parts[-1][1] = lane
        else:
            parts.append([lane, lane])
    shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts[:6])
    return shown + (f", … ({len(parts) - 6} more ranges)" if len(parts) > 6 else "")


def _status(found: Mismatch, stage: str) -> str:
    """pass, fail, shown (numbers without a judgement) or absent."""
    if stage == found.stage and found.verdict == "DEFECT":
        return "fail"
    if stage == "gap":
        return "shown"
    if stage == "floor":
        return "fail" if any(r.wrong for r in found.floor.rows) else "pass"
    if stage == "semantics":
        return "pass" if found.semantics.named is None else "fail"
    if stage == "returned" and found.returned is not None:
        return "pass" if found.returned.explained else "fail"
    if stage == "weights" and found.weights is not None:
        return "fail" if found.weights.differing else "pass"
    if stage == "operators" and found.operators is not None:
        return "fail" if found.operators.wrong else "pass"
    has = found.routing if stage == "routing" else found.shares if stage == "shares" else None
    return "shown" if has else "absent"

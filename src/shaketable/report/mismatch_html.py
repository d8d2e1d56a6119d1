"""The page of a mismatch: one HTML file that takes the person who has to act from the verdict through the stages.

It is made from the JSON of a run and from nothing else, and loads nothing: style is inline, bars are elements with a width,
and a content policy in its head forbids the browser to fetch anything. Tokens and names come from models and files of others:
everything reaches the page through a template that escapes.
"""

from __future__ import annotations

import math
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

STAGES = ("gap", "returned", "floor", "semantics", "weights", "routing", "operators", "shares")
STATUS_OF = {"DEFECT": "fail", "LEGAL": "pass", "INCONCLUSIVE": "inconclusive"}


def page(found: dict[str, Any]) -> str:
    """The self-contained HTML page of what `shaketable mismatch --json` writes."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "ranges": ranges, "quoted": repr}
    return environment.get_template("mismatch.html.jinja").render(
        d=found,
        status=STATUS_OF[found["verdict"]],
        says=found["sentence"].partition(": ")[2].split(". ")[0].rstrip("."),
        more=". ".join(found["sentence"].partition(": ")[2].split(". ")[1:]),
        stages=[(stage, _status(found, stage), _line(found, stage)) for stage in STAGES],
        scale=_scale(found),
        adding_up=_adding_up(found["shares"]),
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


def _status(found: dict[str, Any], stage: str) -> str:
    if stage == found["stage"] and found["verdict"] == "DEFECT":
        return "fail"
    if stage == "floor":
        return "fail" if any(r["wrong"] for r in found["floor"]["rows"]) else "pass"
    if stage == "gap":
        return "told"
    facts = found[stage]
    if not facts:
        return "absent"
    if stage == "returned":
        return "pass" if facts["explained"] else "fail"
    wrong = {"semantics": "named", "weights": "differing", "operators": "wrong"}.get(stage)
    if wrong is not None and facts[wrong]:
        return "fail"
    return "told" if stage in ("routing", "shares") else "pass"


def _line(found: dict[str, Any], stage: str) -> str:
    """What one stage says, in a line."""
    facts = found[stage]
    if not facts:
        return "no experts, or not looked at" if stage == "routing" else "not looked at"
    if stage == "gap":
        far = f"{facts['outside']:.1%} of ratios outside [0.9, 1.1]"
        return f"mean |Δ log p| {facts['mean_abs']:.3g}, KL (k3) {facts['k3']:.3g}, {far}"
    if stage == "floor":
        wrong = [r["wrong"] for r in facts["rows"] if r["wrong"]]
        held = wrong[0] if wrong else "every way of computing is within rounding"
        return f"mean |Δ log p| {facts['mean_abs']:.3g} ({facts['largest']}): {held}"
    if stage == "returned":
        return "the engine's own logits give the returned numbers" if facts["explained"] else facts["says"]
    if stage == "semantics":
        return "no hypothesis removes the gap" if facts["named"] is None else facts["named"]["says"]
    if stage == "weights":
        return (
            f"{len(facts['differing'])} of {facts['compared']} parameters differ"
            if facts["differing"]
            else (
                f"{facts['compared']} parameters are the trainer's"
                + (f", cast to {facts['engine_dtype']}" if facts["cast"] else "")
            )
        )
    if stage == "routing":
        return f"up to {max(r['differs'] for r in facts):.2%} of tokens go to other experts in a layer"
    if stage == "operators":
        count = sum(k["operators"] for k in facts["kinds"].values())
        return f"{len(facts['wrong'])} of {count} operators are wrong" if facts["wrong"] else f"{count} operators, all inside"
    return ", ".join(f"{r['family']} {r['share']:.0%}" for r in facts["families"][:3]) or "no operator differs"


def _scale(found: dict[str, Any]) -> float:
    """The largest mean |Δ log p| of a range of positions, which is a full bar."""
    return max((r["mean_abs"] for r in found["gap"]["by_position"]), default=1.0) or 1.0


def _adding_up(shares: dict[str, Any] | None) -> str:
    if not shares or shares["together"] is None:
        return ""
    return f"All families together make {shares['together']:.2f} times the sum of their KL; 1 means that they add up."

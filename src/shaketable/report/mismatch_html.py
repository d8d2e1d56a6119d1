"""The page of a mismatch: one HTML file that takes the person who has to act from the verdict through the stages.

It loads nothing: style is inline, bars are elements with a width, and a content policy in its head forbids the browser to fetch
anything. Tokens and names come from models and files of others: everything reaches the page through a template that escapes.
"""

from __future__ import annotations

from shaketable.mismatch.results import Mismatch
from shaketable.report.mismatch_lines import stage_lines
from shaketable.report.render import render
from shaketable.report.wording import number, percent, ranges

STATUS_OF = {"DEFECT": "fail", "LEGAL": "pass", "INCONCLUSIVE": "inconclusive"}


def page(found: Mismatch) -> str:
    """The self-contained HTML page."""
    says, _, more = found.sentence.partition(": ")[2].partition(". ")
    return render(
        "mismatch.html.jinja",
        {"number": number, "percent": percent, "ranges": ranges, "quoted": repr},
        d=found,
        status=STATUS_OF[found.verdict],
        says=says.rstrip("."),
        more=more,
        stages=stage_lines(found),
        scale=max((r.mean_abs for r in found.gap.by_position), default=1.0) or 1.0,
    )

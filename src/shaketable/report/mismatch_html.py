"""The page of a mismatch: one HTML file that takes the person who has to act from the verdict through the stages.

It loads nothing: style is inline, bars are elements with a width, and a content policy in its head forbids the browser to fetch
anything. Tokens and names come from models and files of others: everything reaches the page through a template that escapes.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from shaketable.mismatch.results import Mismatch
from shaketable.report.mismatch_lines import stage_lines
from shaketable.report.wording import number, percent, ranges

STATUS_OF = {"DEFECT": "fail", "LEGAL": "pass", "INCONCLUSIVE": "inconclusive"}


def page(found: Mismatch) -> str:
    """The self-contained HTML page."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "ranges": ranges, "quoted": repr}
    says, _, more = found.sentence.partition(": ")[2].partition(". ")
    return environment.get_template("mismatch.html.jinja").render(
        d=found,
        status=STATUS_OF[found.verdict],
        says=says.rstrip("."),
        more=more,
        stages=stage_lines(found),
        scale=max((r.mean_abs for r in found.gap.by_position), default=1.0) or 1.0,
    )

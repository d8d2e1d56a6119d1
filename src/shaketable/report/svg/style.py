"""How an arm looks: a colour, a dash and a marker, the same in every figure.

The seven colours are those of Okabe and Ito without yellow, which paper swallows; they keep apart under every common
colour blindness. Twelve markers and five dashes repeat with other periods, so no two of the first 35 arms share all three and
no two of the first 12 share a marker: colour is never the only difference. The page holds the colours as `--a0` … `--a6`
in a light and a dark version.
"""

from __future__ import annotations

from markupsafe import Markup

COLORS = 7
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")
MARKERS = (
    "M-3.6 0A3.6 3.6 0 1 1 3.6 0A3.6 3.6 0 1 1-3.6 0Z",
    "M-3.2-3.2H3.2V3.2H-3.2Z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0Z",
    "M0-4.2L4 3.2H-4Z",
    "M0 4.2L4-3.2H-4Z",
    "M-1.3-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4V-1.3H-1.3Z",
)
"""Filled for the first six arms, hollow for the next six."""


def look(arm: int) -> Markup:
    """The attributes of everything that is drawn of an arm: its colour class and its number, by which it can be hidden."""
    return Markup('class="arm c{}" data-arm="{}"').format(arm % COLORS, arm)


def marker(arm: int, x: float = 0, y: float = 0) -> Markup:
    """The arm's marker at a place of a view box."""
    hollow = " hollow" if arm // len(MARKERS) % 2 else ""
    shape = '<path class="marker{}" transform="translate({:.1f} {:.1f})" d="{}"/>'
    return Markup(shape).format(hollow, x, y, MARKERS[arm % len(MARKERS)])


def pin(arm: int, x: float, y: str) -> Markup:
    """The arm's marker at x percent of a strip: an SVG of its own, for a transform takes no percentages."""
    return Markup('<svg class="pin" x="{:.2f}%" y="{}">{}</svg>').format(x, y, marker(arm))


def dash(arm: int) -> str:
    """The arm's dash pattern; empty for a solid line."""
    return DASHES[arm % len(DASHES)]


def swatch(arm: int) -> Markup:
    """A short line with the marker, to stand before the arm's name. It says nothing the name does not."""
    line = Markup('<path class="line" stroke-dasharray="{}" d="M0 7H28"/>').format(dash(arm))
    body = Markup("<g {}>{}{}</g>").format(look(arm), line, marker(arm, 14, 7))
    return Markup('<svg class="swatch" width="28" height="14" aria-hidden="true" focusable="false">{}</svg>').format(body)

"""A page of the tables that a verb prints: the same rows and sentences as on the screen, in the look of the other pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from shaketable import __version__
from shaketable.report.render import render


def page(
    verb: str,
    subject: str,
    tag: str,
    sentence: str,
    tables: Sequence[tuple[str, Table]],
    *,
    status: str = "shown",
    facts: Mapping[str, str] | None = None,
    lines: Sequence[str] = (),
) -> str:
    """The self-contained HTML page.

    Args:
        verb: Which one made it.
        subject: The model.
        tag: The verdict, in a word or two.
        sentence: The verdict.
        tables: Each with its title, as it is printed.
        status: The colour of the verdict: `pass`, `fail`, `inconclusive` or `shown`.
        facts: What was asked.
        lines: Sentences below the tables.
    """
    return render(
        "tables.html.jinja",
        {"plain": _plain},
        verb=verb,
        subject=subject,
        tag=tag,
        sentence=sentence,
        status=status,
        facts=facts or {},
        tables=tables,
        lines=lines,
        version=__version__,
    )


def _plain(cell: object) -> str:
    """A cell of rich's without its markup."""
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

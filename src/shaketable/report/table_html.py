"""A page of the tables that a verb prints: the same rows and sentences as on the screen, in the look of the other pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from shaketable import __version__


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
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = _plain
    return environment.get_template("tables.html.jinja").render(
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

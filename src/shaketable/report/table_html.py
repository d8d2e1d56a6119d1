"""A page of the tables that a verb prints: the same rows and sentences as on the screen, in the look of the other pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from shaketable import __version__


@dataclass(frozen=True)
class PageHead:
    """The heading of a column, and whether its cells are numbers."""

    text: str
    right: bool


@dataclass(frozen=True)
class PageTable:
    """A table without markup."""

    title: str
    heads: list[PageHead]
    rows: list[list[str]]


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
    return environment.get_template("tables.html.jinja").render(
        verb=verb,
        subject=subject,
        tag=tag,
        sentence=sentence,
        status=status,
        facts=facts or {},
        tables=[_plain(title, table) for title, table in tables],
        lines=lines,
        version=__version__,
    )


def _plain(title: str, table: Table) -> PageTable:
    heads = [PageHead(_text(column.header), column.justify == "right") for column in table.columns]
    rows = zip(*([_text(cell) for cell in column.cells] for column in table.columns), strict=True)
    return PageTable(title, heads, [list(row) for row in rows])


def _text(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

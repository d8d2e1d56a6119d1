"""Text that is printed as it is, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, line: str) -> None:
    """One line, not wrapped: who pipes it gets it whole."""
    console.print(line, markup=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", "\\[")


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Names with what they are, in two columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, what in rows:
        table.add_row(Text(name), Text(what))
    Console(highlight=False).print(table)

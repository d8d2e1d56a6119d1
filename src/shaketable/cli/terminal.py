"""What all verbs print with: a console, lines that stay whole, and a progress bar. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 128
"""Columns of a table that goes to a file or a pipe."""


class Bar:
    """A progress bar that moves when it is called."""

    def __init__(self, bars: Progress, start: str, total: float | None) -> None:
        self._bars, self._row = bars, bars.add_task(start, total=total, shown="")

    def __call__(self, **changed: Any) -> None:
        """Change any of `description`, `completed`, `total`, and `shown`, a few words beside the bar."""
        self._bars.update(self._row, **changed)

    def layers(self, done: int, total: int, text: str) -> None:
        self(completed=done, total=total, description=text)


def console(stderr: bool = False) -> Console:
    """A console without highlighting; wide where the output is not a terminal."""
    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal:
        found.width = max(found.width, PIPE_WIDTH)
    return found


def say(out: Console, *lines: str, style: str | None = None) -> None:
    """Lines as they are: not wrapped, so that a pipe gets them whole, and without markup."""
    for line in lines:
        out.print(line, markup=False, soft_wrap=True, style=style)


def warn(out: Console, text: str, word: str = "warning") -> None:
    """A line that begins with a coloured word."""
    out.print(f"[bold yellow]{word}:[/] {plain(text)}", soft_wrap=True)


def plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", "\\[")


def table_of(left: str | Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table without frames: columns of text, then columns of numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in [left] if isinstance(left, str) else left:
        table.add_column(head, overflow="fold")
    for head in right:
        table.add_column(head, justify="right", overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """A table below its title, which is not wrapped to the width of the table."""
    if table.title is not None:
        out.print(table.title, soft_wrap=True, style="italic")
        table.title = None
    out.print(table)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, meaning in rows:
        table.add_row(Text(name), Text(meaning))
    Console(highlight=False).print(table)


@contextmanager
def progress_bar(start: str = "loading", total: float | None = None) -> Iterator[tuple[Bar, Console]]:
    """A bar on standard error that disappears at the end, and the console for lines above it."""
    out = Console(stderr=True, highlight=False)
    text, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    columns = (text, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), numbers)
    with Progress(*columns, console=out, transient=True) as bars:
        yield Bar(bars, start, total), out

"""Text that is printed as it is, whatever it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, line: str) -> None:
    """One line, not wrapped: who pipes it gets it whole."""
    console.print(line, markup=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", "\\[")

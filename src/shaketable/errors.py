"""Everything Shaketable raises on purpose. A message is one line: what was wrong, what is valid, the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


LONGEST = 2000
"""Characters of a message: a line that can be read, whatever it quotes."""


class ShaketableError(Exception):
    """Base of all errors raised on purpose. A message is one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        text = " ".join(str(message).split())
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 300]} … {text[-300:]}")


class PlanError(ShaketableError, ValueError):
    """The plan cannot be read, or asks for a combination that is not supported."""


class NoMatchError(PlanError):
    """The plan is well formed, but nothing in this model answers to it."""


class InertError(ShaketableError, RuntimeError):
    """The plan was active and did nothing: it never fired, or it changed no value."""


class ModelError(ShaketableError, ValueError):
    """The model cannot be found, read or used."""


class UnavailableError(ShaketableError):
    """Something that cannot be observed or judged here; the message says why, and a verdict repeats it."""


def nearest(name: str, valid: Iterable[str], shown: int = 8) -> str:
    """Ends an error line: the nearest valid name and the valid ones."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    more = f", … ({len(names)} in all)" if len(names) > shown else ""
    return f"{hint}valid: {', '.join(names[:shown])}{more}"


def check_word(what: str, word: str, valid: Iterable[str]) -> None:
    """Raise unless a word is one of the valid ones."""
    if word not in (known := tuple(valid)):
        raise ShaketableError(f"unknown {what} {word!r}; {nearest(word, known, shown=12)}")


def first_problem(error: ValidationError, skip: Container[object] = ()) -> str:
    """The first of pydantic's complaints as an error line: the field without the parts to `skip`, the reason, the value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part not in skip)
    why = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("value_error", "missing") else f" (got {_shown(first['input'])})"
    return f"{where}: {why}{got}" if where else why


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of more than 4300 digits
        return "a huge number"

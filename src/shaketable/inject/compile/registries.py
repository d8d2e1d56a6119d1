"""Tables that compiled code reads by number: how an entry leaves them.

An entry goes when its owner is gone. Not at once: the garbage collector runs at any time, also while dynamo walks through such
a table to trace it, and then a dictionary that changes its size ends the compilation. So what is gone is noted, and taken out
when the next entry comes, which is never during a trace.
"""

from __future__ import annotations

import weakref
from typing import Any

_gone: list[tuple[dict[int, Any], int]] = []


def leave_with(owner: object, table: dict[int, Any], key: int) -> None:
    """Take an entry out of a table some time after its owner is gone."""
    sweep()
    weakref.finalize(owner, _gone.append, (table, key))


def sweep() -> None:
    """Take out what is gone."""
    while _gone:
        table, key = _gone.pop()
        table.pop(key, None)

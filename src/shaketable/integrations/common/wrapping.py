"""Put a function of ours around one of a framework's. Standard library only: every vLLM and every Ray loads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_AROUND = "_shaketable_around"
_ABSENT = object()


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Make `owner.name(…)` call `around(original, …)`; no-op where it does so already.

    Args:
        owner: A module, a class, or a single object.
        name: A function or method of it.
        around: Takes the original in front of the arguments of the call.

    Returns:
        A function that restores the original. What other code has put there since stays.
    """
    original = getattr(owner, name)
    present = getattr(original, _AROUND, ())
    if around in present:
        return lambda: None
    before = vars(owner).get(name, _ABSENT)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _AROUND, (*present, around))
    setattr(owner, name, wrapped)

    def undo() -> None:
        if vars(owner).get(name) is not wrapped:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo

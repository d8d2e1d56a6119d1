"""Hooks that stay behind when a model is copied.

A deep copy or a pickle of a module takes its hooks along. A copy of ours would shake a model that no plan was given for,
and would drag locks and ledgers with it. So a copied or pickled hook is a hook that does nothing: copies are clean.
"""

from __future__ import annotations

from typing import Any


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""


class Hook:
    """Base of everything that is registered on a module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return do_nothing

    def __reduce__(self) -> Any:
        return _left_behind, ()


def _left_behind() -> Any:
    return do_nothing

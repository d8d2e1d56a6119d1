"""Tensors inside of what modules take and return: nested tuples, lists and mappings."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor inside of nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for member in value:
            yield from tensors_of(member)
    elif isinstance(value, dict | UserDict):
        for member in value.values():
            yield from tensors_of(member)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(v, change) for v in value)
    if isinstance(value, dict | UserDict):
        mapped = copy.copy(value)
        for key, member in value.items():
            mapped[key] = map_tensors(member, change)
        return mapped
    return value

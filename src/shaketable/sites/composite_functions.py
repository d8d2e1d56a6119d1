"""Functions of torch.nn.functional that are written in Python and call others, such as multi-head attention.

A TorchFunctionMode is shown such a function as a whole, because its first lines ask for overrides. Opened, it does not ask, and
the functions that it calls are hit one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

_ASKING = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def is_composite(func: Any) -> bool:
    """Whether a function can be opened."""
    asks = isinstance(func, FunctionType) and not _ASKING.isdisjoint(func.__code__.co_names)
    return asks and func.__module__ == "torch.nn.functional"


@functools.cache
def opened(func: FunctionType) -> Callable[..., Any]:
    """The same function without its question for overrides."""
    scope = {**func.__globals__, **dict.fromkeys(_ASKING, lambda *tensors: False)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy

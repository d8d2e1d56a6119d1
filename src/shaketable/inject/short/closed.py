"""Whether code can call a covered operator: proven from its bytecode, or not at all.

What is closed holds arithmetic and a few harmless names, and nothing that could call something else: no product sign, no code
inside of it, no callable that it is given.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_ARITHMETIC = {"dtype", "float32", "to", "float", "type_as", "pow", "square", "mean", "rsqrt", "sqrt"}
_OF_NORMS = _ARITHMETIC | {"torch", "weight", "variance_epsilon", "eps"}
_OF_FUNCTIONS = _ARITHMETIC | {"shape", "unsqueeze", "cat", "chunk", "stack"}
_LOOSE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_PLAIN = (int, float, bool, type(None))
ORIGINAL = "_shaketable_function"
"""Of a function that stands for another one: that one."""
Found = tuple[dict[str, Any], str, FunctionType]
"""A function, where it was found and by which name."""


@functools.cache
def is_closed(kind: Any) -> bool:
    """Whether the forward of this class can call no product: one argument, arithmetic and harmless names alone."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or forward.__closure__ or forward.__globals__.get("torch") is not torch:
        return False
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount:
        return False
    return set(code.co_names) <= _OF_NORMS and _is_simple(code)


def is_closed_function(function: Any) -> bool:
    """The same of a function, if it is given tensors and numbers alone; it may call others by name that are closed."""
    return _reach(function, ()) is not None


def called(function: FunctionType) -> tuple[Found, ...]:
    """The functions that a closed one calls by name, and those that they call: the proof is of these alone."""
    return _reach(function, ()) or ()


def bare(function: Any) -> Any:
    """The function itself, where another one of ours stands for it."""
    return getattr(function, ORIGINAL, function)


def _reach(function: Any, above: tuple[Any, ...]) -> tuple[Found, ...] | None:
    """What a function calls, if it is closed; None if it is not."""
    if not isinstance(function, FunctionType) or function.__closure__ or function in above:
        return None
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not _is_simple(function.__code__) or any(type(value) not in _PLAIN for value in given):
        return None
    home, found = function.__globals__, []
    for is_global, name in _names(function.__code__):
        if not is_global:
            if name not in _OF_FUNCTIONS:
                return None
        elif name != "torch" or home.get(name) is not torch:
            inner = bare(home.get(name))
            below = _reach(inner, (*above, function))
            if below is None:
                return None
            found += [(home, name, inner), *below]
    return tuple(found)


def _is_simple(code: CodeType) -> bool:
    products = any(i.opname == "BINARY_OP" and "@" in i.argrepr for i in dis.get_instructions(code))
    nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
    return not (products or nested or code.co_flags & _LOOSE)


def _names(code: CodeType) -> Iterator[tuple[bool, str]]:
    """Every name in the code, and whether it is looked for among the globals; a name can be both."""
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            yield instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"), instruction.argval

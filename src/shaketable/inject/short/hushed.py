"""Norms written out in Python, on a card: the operator mode waits outside, where it can be proven to have nothing to do.

A torch function mode is called for every function of torch, a microsecond or two each, and of the two thousand of a small
model's forward pass two hundred are products. The mode cannot be told which ones it is for. But a module whose code holds
nothing but arithmetic has none: `is_closed` reads its bytecode. A quarter of all calls are in such norms.

Rejected: to learn from a first pass where products are. A branch that is taken later would be missed, and nobody would know.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shaketable.inject.dressed import dressed, exchanged

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection

_SLOT = "_shaketable_hushed"
_TORCH = {"torch", "dtype", "float32", "to", "float", "type_as", "pow", "square", "mean", "rsqrt", "sqrt"}
_HARMLESS = _TORCH | {"weight", "variance_epsilon", "eps"}
_modes: Any = torch._C._len_torch_function_stack
_mode_at: Any = torch._C._get_function_stack_at
_pop: Any = torch._C._pop_torch_function_stack
_push: Any = torch._C._push_on_torch_function_stack


@functools.cache
def is_closed(kind: Any) -> bool:
    """Whether the forward of this class can call no product: one argument, arithmetic and harmless names alone."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or forward.__closure__ or forward.__globals__.get("torch") is not torch:
        return False
    code = forward.__code__
    loose = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & loose:
        return False
    products = any(i.opname == "BINARY_OP" and "@" in i.argrepr for i in dis.get_instructions(code))
    nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
    return set(code.co_names) <= _HARMLESS and not products and not nested


class Hush:
    """One injection that leaves one module alone; a second one finds it dressed and looks into it. Removed like a hook."""

    def __init__(self, module: nn.Module, injection: Injection) -> None:
        self.module, self.mode = module, injection._mode
        original: Any = type(module)
        self.original = original
        module.__dict__[_SLOT] = self
        module.__class__ = hushed(original)

    def remove(self) -> None:
        """Give the module its own class back."""
        if self.module.__dict__.get(_SLOT) is self:
            now: Any = type(self.module)
            self.module.__class__ = exchanged(now, hushed(self.original), self.original)
            del self.module.__dict__[_SLOT]

    def give_way(self) -> None:
        """Something else wants to dress the module: from now on the mode looks into it."""
        self.remove()


@functools.cache
def hushed(original: Any) -> Any:
    """The class of a module, whose forward our mode does not see where it is the only one."""

    @functools.wraps(original.forward)
    def forward(self: Any, x: Any) -> Any:
        hush: Hush | None = self.__dict__.get(_SLOT)
        if torch.compiler.is_compiling() or hush is None or _modes() != 1 or _mode_at(0) is not hush.mode:
            return original.forward(self, x)
        mode = _pop()
        try:
            return original.forward(self, x)
        finally:
            _push(mode)

    return dressed(original, _SLOT, {"forward": forward})

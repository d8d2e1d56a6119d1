"""Where the operator mode waits outside on a card: norms and rotations written out in Python, and linears.

A torch function mode is called for every function of torch, a microsecond or two each, and of the two thousand of a small
model's forward pass two hundred are products. The mode cannot be told which ones it is for. But code that holds nothing but
arithmetic has none (`closed.py` reads its bytecode): a quarter of all calls are in such norms, another quarter in what rotates
queries and keys. And in a linear there is one thing to do, which can be done without torch calling the mode for it.

Such functions are exchanged where the code of the model's modules finds them, while a plan is on one of its models. Whoever
has a function by another name calls it as ever, and the mode looks into it: nothing is missed.

Rejected: to learn from a first pass where products are. A branch that is taken later would be missed, and nobody would know.
And a key of torch's dispatcher that wakes up for products alone: code that is compiled inside of a pass would not be met.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaketable.inject.dressed import dressed, exchanged
from shaketable.inject.short.closed import ORIGINAL, bare, called, is_closed_function

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection

_SLOT = "_shaketable_hushed"
_modes: Any = torch._C._len_torch_function_stack
_mode_at: Any = torch._C._get_function_stack_at
_pop: Any = torch._C._pop_torch_function_stack
_push: Any = torch._C._push_on_torch_function_stack
_PLAIN = (Tensor, nn.Parameter, int, float, bool, type(None))
"""What a function is given where it is certain that its code does what it says."""


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

    @functools.wraps(nn.Linear.forward)
    def linear(self: Any, input: Tensor) -> Tensor:
        hush: Hush | None = self.__dict__.get(_SLOT)
        given = input, self.weight, self.bias
        if torch.compiler.is_compiling() or hush is None or _modes() != 1 or _mode_at(0) is not hush.mode:
            return F.linear(*given)
        mode = _pop()
        try:
            y: Tensor | None = mode.products.linear(F.linear, given)
        finally:
            _push(mode)
        return F.linear(*given) if y is None else y

    return dressed(original, _SLOT, {"forward": linear if original is nn.Linear else forward})


class HushedFunction:
    """One function of a module's code into which no operator mode of ours looks. Removed like a hook."""

    _all: ClassVar[dict[tuple[int, str, FunctionType], HushedFunction]] = {}

    def __init__(self, home: dict[str, Any], name: str) -> None:
        self.home, self.name, self.users = home, name, 0
        self.original: FunctionType = bare(home[name])
        self.quiet = _quiet(self.original)

    @classmethod
    def of(cls, home: dict[str, Any], name: str) -> HushedFunction:
        """The function of this name among the globals of a module; several plans share it."""
        key = id(home), name, bare(home[name])
        found = cls._all[key] = cls._all.get(key) or cls(home, name)
        found.users += 1
        home[name] = found.quiet
        return found

    def remove(self) -> None:
        """The last one puts the function back, unless somebody else has put another one there."""
        self.users -= 1
        if self.users == 0:
            del self._all[id(self.home), self.name, self.original]
            if self.home.get(self.name) is self.quiet:
                self.home[self.name] = self.original


def hush_functions(module: nn.Module) -> list[HushedFunction]:
    """The functions that this module's forward calls by name and in which no operator can be."""
    plain: Any = getattr(type(module), "_shaketable_plain", type(module))
    forward = plain.forward
    if not isinstance(forward, FunctionType):
        return []
    home = forward.__globals__
    return [HushedFunction.of(home, name) for name in forward.__code__.co_names if is_closed_function(bare(home.get(name)))]


def _quiet(original: FunctionType) -> Any:
    """The function, outside of which our mode waits where it is the only one."""
    inner = called(original)

    @functools.wraps(original)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _modes() != 1 or not getattr(_mode_at(0), "is_ours", False):
            return original(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if type(value) not in _PLAIN:
                return original(*args, **kwargs)
        for home, name, proven in inner:
            if bare(home.get(name)) is not proven:
                return original(*args, **kwargs)
        mode = _pop()
        try:
            return original(*args, **kwargs)
        finally:
            _push(mode)

    setattr(quiet, ORIGINAL, original)
    return quiet

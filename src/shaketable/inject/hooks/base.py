"""Hooks that stay behind when a model is copied.

A deep copy or a pickle of a module takes its hooks along. A copy of ours would shake a model that no plan was given for,
and would drag locks and ledgers with it. So as long as a plan is on any model, what a module gives to be copied or pickled
(`nn.Module.__getstate__`) is without our hooks and marks: a copy is as if we had never been there, and a pickle can be read
where Shaketable is not installed. Where a class has a `__getstate__` of its own that does not ask torch's, a hook of ours
becomes one that does nothing.

Rejected: a reducer on each module (it would be part of what is copied), and a dictionary of hooks that leaves ours out (handles
that others hold refer to the one that was there).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

_state: Any = nn.Module.__getstate__
_FLAGS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where torch keeps hooks, and what it notes of them under the same numbers."""
_plans = 0
"""How many plans are on models."""


def keep_copies_clean() -> None:
    """A plan is put on a model."""
    global _plans
    _plans += 1
    type.__setattr__(nn.Module, "__getstate__", _clean_state)


def end_clean_copies() -> None:
    """It is taken off; with the last one torch has its own function back."""
    global _plans
    _plans -= 1
    if not _plans:
        type.__setattr__(nn.Module, "__getstate__", _state)


def _clean_state(module: nn.Module) -> dict[str, Any]:
    state = {name: value for name, value in _state(module).items() if not name.startswith("_shaketable")}
    for name, flags in _FLAGS.items():
        ours = {number for number, hook in state[name].items() if isinstance(hook, Hook)}
        for each in (name, *flags) if ours else ():
            state[each] = OrderedDict((number, found) for number, found in state[each].items() if number not in ours)
    return state


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""


def never_compiled_alone(function: Any) -> None:
    """Have dynamo trace a function inside of what it compiles, and never compile it by itself.

    After a graph break in a loop it does, and torch 2.13 does not guard which function a torch function mode was called for:
    the code compiled for one is run for another (`x.square().mean()` becomes `x.square().square()`, with any mode).
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


class Hook:
    """Base of everything that is registered on a module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return do_nothing

    def __reduce__(self) -> Any:
        return _left_behind, ()


def _left_behind() -> Any:
    return do_nothing

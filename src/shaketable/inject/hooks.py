"""Hooks that stay behind when a model is copied.

A deep copy or a pickle of a module takes its hooks along. A copy of ours would shake a model that no plan was given for,
and would drag locks and ledgers with it. So a copied or pickled hook is a hook that does nothing: copies are clean.
"""

from __future__ import annotations

from typing import Any


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

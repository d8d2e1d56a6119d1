"""The phase of a program: rollout, train or eval.

The phase of a forward pass is, in this order: that of `with phase("eval"):`; the one set on the injection of a sampling
engine's model (`Injection.phase`); `rollout` inside `model.generate`; `train` or `eval` as the model's training flag says. So
an evaluation that samples is an evaluation.

One outermost `generate`, or one outermost `with phase("rollout"):`, is one rollout (`current_rollout`).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from shaketable.errors import PlanError, nearest
from shaketable.plan import PHASES

_explicit: ContextVar[str | None] = ContextVar("shaketable_phase", default=None)
_generating: ContextVar[bool] = ContextVar("shaketable_generating", default=False)
_rollout: ContextVar[int | None] = ContextVar("shaketable_rollout", default=None)
_rollouts = itertools.count()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside belongs to the phase `name` (rollout, train or eval)."""
    if name not in PHASES:
        raise PlanError(f"unknown phase {name!r}; {nearest(name, PHASES)}")
    token = _explicit.set(name)
    try:
        with _one_rollout() if name == "rollout" else nullcontext():
            yield
    finally:
        _explicit.reset(token)


def current_phase(training: bool, engine: str | None = None) -> str:
    """The phase now, for a model whose training flag is `training`; `engine` is the phase of its sampling engine, if any."""
    return _explicit.get() or engine or ("rollout" if _generating.get() else "train" if training else "eval")


def current_rollout() -> int | None:
    """A number for the rollout that is running, another for each in this process; None outside of rollouts."""
    return _rollout.get() if _explicit.get() in (None, "rollout") else None


@contextmanager
def _one_rollout() -> Iterator[None]:
    """Everything inside is one rollout, or part of the one around it."""
    token = _rollout.set(next(_rollouts) if _rollout.get() is None else _rollout.get())
    try:
        yield
    finally:
        _rollout.reset(token)


_marked: dict[type, tuple[Any, int]] = {}
_lock = threading.Lock()


def mark_generate(model_class: type) -> type | None:
    """Make `generate` of a class a rollout by itself; returns the class that defines it, for `unmark_generate`."""
    home = next((c for c in model_class.__mro__ if callable(c.__dict__.get("generate"))), None)
    if home is None:
        return None
    with _lock:
        original, users = _marked.get(home, (home.__dict__["generate"], 0))
        if users == 0:
            home.generate = as_rollout(original)  # type: ignore[attr-defined]
        _marked[home] = (original, users + 1)
    return home


def unmark_generate(home: type) -> None:
    """Undo one `mark_generate`; the last one puts the method back."""
    with _lock:
        original, users = _marked.pop(home)
        if users > 1:
            _marked[home] = (original, users - 1)
        else:
            home.generate = original  # type: ignore[attr-defined]


def as_rollout(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate`, marked as a rollout by itself."""

    @functools.wraps(generate)
    def marked(*args: Any, **kwargs: Any) -> Any:
        token = _generating.set(True)
        try:
            with _one_rollout():
                return generate(*args, **kwargs)
        finally:
            _generating.reset(token)

    return marked

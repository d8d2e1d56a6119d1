"""Activation checkpointing: what is computed a second time must see the noise of the first.

torch.utils.checkpoint runs a function, forgets what it saved, and runs the function again inside backward, without
the modules that were around it. While a plan is active, every checkpointed function remembers the frames it was first called
in and gets them back for its second run: same moments, same counts, so the same keys, whether it is a layer, a leaf,
several modules or a bare product.

The two places patched are the ones that keep the function for the second run; the names people import (`checkpoint`)
stay untouched, so it does not matter when they were imported. Checkpointing by others (DeepSpeed, FairScale) calls
whole layers again, which `Calls` recognises by the address of their input.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint as checkpoint

from shaketable.inject.pass_context import Frame, in_backward

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection

_watching: list[Injection] = []
_originals: dict[str, Any] = {}
_lock = threading.Lock()


def watch(injection: Injection) -> None:
    """Keep the frames of this injection for whatever is checkpointed from now on."""
    with _lock:
        if injection in _watching:
            return
        _watching.append(injection)
        if len(_watching) == 1:
            _patch()


def unwatch(injection: Injection) -> None:
    """Undo `watch`; the last one puts torch's own functions back."""
    with _lock:
        if injection not in _watching:
            return
        _watching.remove(injection)
        if not _watching:
            checkpoint._checkpoint_without_reentrant_generator = _originals["generator"]
            setattr(checkpoint.CheckpointFunction, "forward", _originals["forward"])  # noqa: B010


def _patch() -> None:
    generator = checkpoint._checkpoint_without_reentrant_generator
    forward: Callable[..., Any] = checkpoint.CheckpointFunction.forward
    _originals.update(generator=generator, forward=staticmethod(forward))

    @functools.wraps(generator)
    def remembering(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_remember(fn), *args, **kwargs)

    @functools.wraps(forward)
    def remembering_forward(ctx: Any, fn: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _remember(fn), *args)

    checkpoint._checkpoint_without_reentrant_generator = remembering
    setattr(checkpoint.CheckpointFunction, "forward", staticmethod(remembering_forward))  # noqa: B010


def _remember(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which inside backward runs in the frames that are open now."""
    found = [(i, i.calls.top()) for i in list(_watching) if i.enabled]
    frames = [(injection, frame.again()) for injection, frame in found if frame is not None]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            return fn(*args, **kwargs)
        with ExitStack() as stack:
            for injection, frame in frames:
                stack.enter_context(_reopened(injection, frame.again()))
            return fn(*args, **kwargs)

    return run


@contextmanager
def _reopened(injection: Injection, frame: Frame) -> Iterator[None]:
    """`frame` as the only open one of this thread, with the operator mode on."""
    calls = injection.calls
    before = list(calls.stack)
    calls.stack[:] = [frame]
    pushed = injection.enabled and injection.push_mode()
    try:
        yield
    finally:
        if pushed:
            injection.drop_mode()
        calls.stack[:] = before

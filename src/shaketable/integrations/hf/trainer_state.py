"""What a callback of a Hugging Face trainer is not told: the trainer it runs in, the other ranks, and whose pass this is.

No callback fires when an evaluation begins, none between generation and loss, and none when a trainer raises. Methods of the
trainer are called at those times, so for as long as a training runs, two of them are exchanged on that one trainer
(`Exchanged`): no class is patched, other trainers notice nothing, and what leaves a method by an exception is seen.

The trainer is found on the stack: the callback is called by it. Rejected: asking the user for it, which is a third line, and
impossible where the callback is an argument of the trainer's constructor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import Trainer

from shaketable.errors import ShaketableError

Around = Callable[[], AbstractContextManager[None]]


def running_trainer() -> Any:
    """The trainer that is calling a callback now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise ShaketableError("the callback was not called by a transformers Trainer; use st.inject and AQN.attach in other loops")


def running_call(trainer: Any) -> FrameType:
    """The frame of the call of the trainer that is running, its `train`: the outermost on the stack that is the trainer's."""
    frame: FrameType | None = sys._getframe(1)
    found = frame
    while frame is not None:
        found = frame if frame.f_locals.get("self") is trainer else found
        frame = frame.f_back
    assert found is not None
    return found


def is_running(call: FrameType) -> bool:
    """Whether a call has not returned or raised yet: Python refuses to clear a frame that is being executed."""
    try:
        call.clear()
    except RuntimeError:
        return True
    return False


class Exchanged:
    """Methods of one object that run inside a context; `undo` gives it its own back."""

    def __init__(self, who: Any, **around: Around) -> None:
        self.who = who
        self.before = {name: who.__dict__.get(name) for name in around}
        self.ours = {name: _inside(context, getattr(who, name)) for name, context in around.items()}
        who.__dict__.update(self.ours)

    def undo(self) -> None:
        """Put back what was there; what somebody else has put there since is theirs and stays."""
        for name, ours in self.ours.items():
            if self.who.__dict__.get(name) is not ours:
                continue
            if self.before[name] is None:
                del self.who.__dict__[name]
            else:
                self.who.__dict__[name] = self.before[name]


def _inside(context: Around, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return run


def reference_test(model: nn.Module) -> Callable[[], bool] | None:
    """Tells passes of the reference from those of the policy where PEFT makes them one module; None without adapters.

    The reference is the model with its adapters off, or with a frozen copy of them on (`ref`, in TRL): with other ones, in
    any case, than those that were on when training began.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    layers = () if tuners is None else (m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer))
    layer: Any = next(iter(layers), None)
    if layer is None:
        return None
    trained = list(layer.active_adapters)
    return lambda: bool(layer.disable_adapters) or layer.active_adapters != trained


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized()


def from_all_ranks(value: Any) -> list[Any]:
    """The value of every rank, in their order; all ranks have to ask."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

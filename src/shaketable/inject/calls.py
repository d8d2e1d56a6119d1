"""Which call is this? The moment that keys the noise, the layer an operator belongs to, the phase.

Every hooked container of a model opens a *frame* when it is called. The outermost frame is a forward pass: it fixes
the phase and draws a new *moment*, a 64-bit number made from (step, phase, number of the pass). Inner frames derive
their moment from their parent's, so a moment names one call of one module in one pass, however often it is shared.

Activation checkpointing calls a module a second time, inside backward and without its parents. That call must see the
noise of the first one: `recompute.py` opens the frames of the first call again. Where that is not possible (checkpointing
that is not torch's own), a forward inside an autograd graph task with no frame open finds its moment by the address of its
input, which checkpointing has kept alive for exactly this purpose.

Frames live in thread-local storage, one stack per injection: threads and nested injections do not see each other.
Rejected: a global "current layer" variable, which the study we come from used, and whose value in backward was whatever
layer came last in forward. Gradient errors here carry the frame of their forward call with them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.faults.generator import mix64
from shaketable.plan import PHASES
from shaketable.sites.phases import current_phase

_REMEMBERED = 256
"""Calls remembered per module: more than the micro-batches that are between forward and backward at any time."""


@dataclass(eq=False, slots=True)
class Entry:
    """A module at which a frame can open."""

    index: int
    module: nn.Module
    layer: int | None
    owner: int = 0
    """Which of the models of the injection it belongs to."""
    excluded: str | None = None
    """lm_head, router or lora when the module is one or lies inside one."""
    is_root: bool = False
    atomic: str | None = None
    """The operator family that the module as a whole is (an RMSNorm written out in Python)."""
    moments: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Input address to moment and phase, for recomputation."""

    def remember(self, address: int, moment: int, phase: str) -> None:
        """Keep the moment of a call under the address of its input."""
        self.moments.pop(address, None)
        self.moments[address] = (moment, phase)
        if len(self.moments) > _REMEMBERED:
            self.moments.pop(next(iter(self.moments)))


@dataclass(eq=False, slots=True)
class Frame:
    """One call of one module."""

    entry: Entry
    moment: int
    phase: str
    layer: int | None
    excluded: str | None
    recomputing: bool
    counts: dict[object, int] = field(default_factory=dict)
    caller: FrameType | None = None
    """The Python frame of an outermost call: gone from the stack when an interrupt went through it."""

    def again(self) -> Frame:
        """The same frame for a recomputation, counting on from here."""
        return Frame(self.entry, self.moment, self.phase, self.layer, self.excluded, True, dict(self.counts))

    def count(self, who: object) -> int:
        """How often `who` has been counted in this frame before."""
        n = self.counts.get(who, 0)
        self.counts[who] = n + 1
        return n


class Calls:
    """The frames of one injection."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.phase: str | None = None
        """What the engine that the models live in is doing; None where they live in no engine."""
        self._local = threading.local()
        self._passes: dict[tuple[int | tuple[object, int], str], int] = {}
        self._lock = threading.Lock()

    def set_step(self, step: int) -> None:
        """Begin step `step`: passes are counted from zero again, so that a resumed run draws the same noise."""
        with self._lock:
            self.step = step
            self._passes.clear()

    @property
    def stack(self) -> list[Frame]:
        """The open frames of this thread."""
        try:
            stack: list[Frame] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack

    def top(self) -> Frame | None:
        """The innermost open frame of this thread."""
        stack = self.stack
        return stack[-1] if stack else None

    def open(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        """The frame of a call of `entry`'s module, not yet pushed."""
        if entry.is_root:
            self._drop_dead()
        parent = self.top()
        if parent is not None:
            n = parent.count(entry)
            moment = mix64(parent.moment ^ ((entry.index << 20) + n))
            frame = Frame(
                entry, moment, parent.phase, _first(entry.layer, parent.layer), _named(entry, parent), parent.recomputing
            )
        else:
            frame = self._outermost(entry, args, kwargs)
        if not frame.recomputing and (torch.is_grad_enabled() or entry.module.training):
            entry.remember(_address(args, kwargs), frame.moment, frame.phase)
        return frame

    def _outermost(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        if in_backward() and (known := entry.moments.get(_address(args, kwargs))):
            return Frame(entry, known[0], known[1], entry.layer, entry.excluded, recomputing=True)
        phase = current_phase(entry.module.training, self.phase)
        moment = self.new_moment(entry.index, phase)
        return Frame(entry, moment, phase, entry.layer, entry.excluded, recomputing=False)

    def new_moment(self, who: int | tuple[object, int], phase: str) -> int:
        """The moment of the next pass of `who` in `phase`: an entry's index, or anything and a number for it."""
        with self._lock:
            n = self._passes.get((who, phase), 0)
            self._passes[who, phase] = n + 1
        number = who if isinstance(who, int) else who[1]
        return mix64(mix64(mix64(self.step) ^ (number << 8 | PHASES.index(phase))) + n)

    def push(self, frame: Frame) -> None:
        """Make `frame` the innermost one."""
        if not self.stack:
            frame.caller = sys._getframe(3)
        self.stack.append(frame)

    def _drop_dead(self) -> None:
        """Forget frames that a KeyboardInterrupt left open: torch's hooks do not run for those."""
        caller = self.stack[0].caller if self.stack else None
        here: FrameType | None = sys._getframe()
        while caller is not None and here is not None:
            if here is caller:
                return
            here = here.f_back
        if caller is not None:
            self.stack.clear()

    def pop(self) -> None:
        """Close the innermost frame."""
        self.stack.pop()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _first(a: int | None, b: int | None) -> int | None:
    return a if a is not None else b


def _named(entry: Entry, parent: Frame) -> str | None:
    return entry.excluded or parent.excluded


def _address(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Address of the first tensor among the arguments, 0 when there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
            return value.data_ptr()
    return 0

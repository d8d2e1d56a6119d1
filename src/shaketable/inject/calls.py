"""Which call is this? The moment that keys the noise, the layer an operator belongs to, the phase.

Every hooked container of a model opens a *frame* when it is called. The outermost frame is a forward pass: it fixes
the phase and draws a new *moment*, a 64-bit number made from (step, phase, number of the pass). Inner frames know the layer;
they share the moment, and what is counted is counted in the outermost one. So a strike is named by its tap, the pass, and
how often the tap has struck in it, whichever containers are hooked, and a card can make the keys of a whole pass at once.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaketable.faults.generator import mix64
from shaketable.plan import PHASES
from shaketable.sites.phases import current_phase

if TYPE_CHECKING:
    from shaketable.inject.board import Pass

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
    moments: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    """Input address to moment, phase and how often the module was called before in that pass; for recomputation."""

    def remember(self, address: int, frame: Frame, n: int) -> None:
        """Keep the moment of a call under the address of its input."""
        self.moments.pop(address, None)
        self.moments[address] = (frame.moment, frame.phase, n)
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
    base: int = 0
    """Where counts begin: a recomputed layer was called before."""
    outer: Frame | None = None
    """The outermost frame; None for that one itself."""
    caller: FrameType | None = None
    """The Python frame of an outermost call: gone from the stack when an interrupt went through it."""
    on_board: bool = False
    """Whether the keys of this pass are on the board of a card; of outermost frames."""
    captured: Pass | None = None
    """The pass of a CUDA graph that this call is captured into."""
    last: tuple[Tensor, int, object, Tensor] | None = None
    """What a linear was given last in this pass, its version, the format, and what became of it; of outermost frames."""
    mix: int | None = None
    """The moment mixed once more, when it has been asked for."""

    @property
    def mixed(self) -> int:
        """The moment, mixed once more: what taps that strike once in a pass are keyed by."""
        root = self.outer or self
        if root.mix is None:
            root.mix = mix64(self.moment)
        return root.mix

    def mixed_at(self, n: int) -> int:
        """The same for the n-th strike, counted from zero, of one tap in the pass."""
        return mix64(self.moment + n) if n else self.mixed

    def again(self) -> Frame:
        """The same frame for a recomputation, counting on from here."""
        root = self.outer or self
        again = Frame(self.entry, self.moment, self.phase, self.layer, self.excluded, True, dict(root.counts), root.base)
        again.captured = self.captured
        return again

    def count(self, who: object) -> int:
        """How often `who` has been counted in this pass before."""
        root = self.outer or self
        n = root.counts.get(who, root.base)
        root.counts[who] = n + 1
        return n


class Calls:
    """The frames of one injection."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.phase: str | None = None
        """What the engine that the models live in is doing; None where they live in no engine."""
        self.local = threading.local()
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
            stack: list[Frame] = self.local.stack
        except AttributeError:
            stack = self.local.stack = []
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
            frame = Frame(
                entry, parent.moment, parent.phase, _first(entry.layer, parent.layer), _named(entry, parent), parent.recomputing
            )
            frame.captured, frame.outer = parent.captured, parent.outer or parent
        else:
            n = 0
            frame = self._outermost(entry, args, kwargs)
        if not frame.recomputing and (torch.is_grad_enabled() or entry.module.training):
            entry.remember(_address(args, kwargs), frame, n)
        return frame

    def _outermost(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        if in_backward() and (known := entry.moments.get(_address(args, kwargs))):
            return Frame(entry, known[0], known[1], entry.layer, entry.excluded, recomputing=True, base=known[2])
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

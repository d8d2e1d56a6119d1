"""Passes: which call of a model this is, what acts in it, and what keys its noise.

Every hooked container of a model opens a `Frame` when it is called. The outermost frame begins a `Pass`
(`Injection.begin_pass`); inner frames know their layer and share the pass, and uses of a tap are counted in the outermost one.
Frames are thread-local, one stack per injection.

**Activation checkpointing** runs a function again inside backward, without the modules around it, and that run must see the
noise of the first. While a plan is active, every function given to torch.utils.checkpoint remembers the frame it was first
called in and gets it back, with the same counts. We patch the two functions that keep the checkpointed function, not the names
that people import. Other libraries (DeepSpeed, FairScale) call whole layers again: a forward inside backward with no frame open
finds its pass by the address of its input, which checkpointing has kept alive.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor, nn

from shaketable.faults.rng import mix64
from shaketable.plan import PHASES
from shaketable.sites.phases import current_phase

if TYPE_CHECKING:
    from shaketable.faults import FaultBase
    from shaketable.inject.injection import Injection
    from shaketable.inject.op import Tap


_REMEMBERED = 256
"""Calls remembered per module: more than the micro-batches that are between forward and backward at any time."""


@dataclass(eq=False, slots=True)
class Pass:
    """One pass: everything that `Injection.begin_pass` has decided for it."""

    injection: Injection
    phase: str
    key: int
    """Keys the noise of the pass; 0 where it is captured, and the clock of a device decides at every replay."""
    acts: tuple[bool, ...]
    """Per clause, whether it acts."""
    faults: tuple[FaultBase, ...]
    """Per clause, the fault as it was when the pass began."""
    captured: bool = False
    """Whether it is captured into a CUDA graph."""
    with_gradients: bool = False
    """Whether gradients were wanted when it began."""
    pages: dict[Any, Tensor] = field(default_factory=dict)
    """Keys, scales and switches that captured kernels read (`cuda_graphs.py`)."""
    mix: int | None = None
    """The key mixed once more, when it has been asked for."""

    def acts_on(self, tap: Tap) -> bool:
        """Whether a tap does anything in this pass. One that was begun before the plan was switched off does nothing more."""
        return self.acts[tap.clause] and self.injection.enabled

    def mixed(self, use: int) -> int:
        """What keys the use number `use` of any tap: the first is asked for most."""
        if use:
            return mix64(self.key + use)
        if self.mix is None:
            self.mix = mix64(self.key)
        return self.mix


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
    passes: dict[int, tuple[Pass, int]] = field(default_factory=dict)
    """Input address to the pass and how often the module was called before in it; for recomputation."""


@dataclass(eq=False, slots=True)
class Frame:
    """One call of one module."""

    entry: Entry
    current: Pass
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

    def again(self) -> Frame:
        """The same frame for a recomputation, counting on from here."""
        root = self.outer or self
        return Frame(self.entry, self.current, self.layer, self.excluded, True, dict(root.counts), root.base)

    def count(self, who: object) -> int:
        """How often `who` has been counted in this pass before."""
        root = self.outer or self
        n = root.counts.get(who, root.base)
        root.counts[who] = n + 1
        return n


class Calls:
    """The frames of one injection."""

    def __init__(self, injection: Injection, step: int = 0) -> None:
        self.injection = injection
        self.step = step
        self.phase: str | None = None
        """What the engine that the models live in is doing; None where they live in no engine."""
        self.local = threading.local()
        self._passes: dict[tuple[int, str], int] = {}
        self.lock = threading.Lock()

    def set_step(self, step: int) -> None:
        """Begin step `step`: passes are counted from zero again, so that a resumed run draws the same noise."""
        with self.lock:
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
        """The innermost open frame of this thread; between the graphs of a compiled pass, that of the pass."""
        stack = self.stack
        return stack[-1] if stack else self.injection.frame_between_graphs()

    def open(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        """The frame of a call of `entry`'s module, not yet pushed."""
        if entry.is_root:
            self._drop_dead()
        parent = self.top()
        if parent is not None:
            n = parent.count(entry)
            layer = parent.layer if entry.layer is None else entry.layer
            frame = Frame(entry, parent.current, layer, entry.excluded or parent.excluded, parent.recomputing)
            frame.outer = parent.outer or parent
        elif in_backward() and (known := entry.passes.get(_address(args, kwargs))):
            return Frame(entry, known[0], entry.layer, entry.excluded, recomputing=True, base=known[1])
        else:
            n = 0
            current = self.injection.begin_pass(entry, current_phase(entry.module.training, self.phase))
            frame = Frame(entry, current, entry.layer, entry.excluded, recomputing=False)
        if not frame.recomputing and (torch.is_grad_enabled() or entry.module.training):
            address = _address(args, kwargs)
            entry.passes.pop(address, None)
            entry.passes[address] = (frame.current, n)
            if len(entry.passes) > _REMEMBERED:
                entry.passes.pop(next(iter(entry.passes)))
        return frame

    def new_key(self, who: int, phase: str) -> int:
        """The key of the next pass in `phase` of the entry with this index."""
        with self.lock:
            n = self._passes.get((who, phase), 0)
            self._passes[who, phase] = n + 1
        return mix64(mix64(mix64(self.step) ^ (who << 8 | PHASES.index(phase))) + n)

    def push(self, frame: Frame) -> None:
        if not self.stack:
            frame.caller = _caller()
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


def _caller() -> FrameType | None:
    """The innermost Python frame that is not ours: that of the call which opens a pass, however the hook was reached."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("shaketable."):
        frame = frame.f_back
    return frame


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _address(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Address of the first tensor among the arguments, 0 when there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
            return value.data_ptr()
    return 0


# ---- activation checkpointing

_watching: list[Injection] = []
_lock = threading.Lock()
_unpatch: Callable[[], None]


def watch(injection: Injection) -> None:
    """Keep the frames of this injection for whatever is checkpointed from now on."""
    global _unpatch
    with _lock:
        if injection not in _watching:
            _watching.append(injection)
            if len(_watching) == 1:
                _unpatch = _patch()


def unwatch(injection: Injection) -> None:
    """Undo `watch`; the last one puts torch's own functions back."""
    with _lock:
        if injection in _watching:
            _watching.remove(injection)
            if not _watching:
                _unpatch()


def _patch() -> Callable[[], None]:
    generator = checkpoint._checkpoint_without_reentrant_generator
    forward: Callable[..., Any] = checkpoint.CheckpointFunction.forward

    def put(a: Any, b: Any) -> None:
        checkpoint._checkpoint_without_reentrant_generator = a
        setattr(checkpoint.CheckpointFunction, "forward", staticmethod(b))  # noqa: B010

    @functools.wraps(generator)
    def remembering(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_remember(fn), *args, **kwargs)

    @functools.wraps(forward)
    def remembering_forward(ctx: Any, fn: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _remember(fn), *args)

    put(remembering, remembering_forward)
    return lambda: put(generator, forward)


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

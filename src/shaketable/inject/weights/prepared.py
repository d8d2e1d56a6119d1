"""Faulty weights that are made ready at the head of a pass, on a GPU.

The general path (`on_read.py`) makes a faulty weight when its module reads it: two hooks, a frame and a launch per module, 100
microseconds of Python where the module itself takes 40. Where no gradient is wanted nothing of this depends on the module's
call. So when a forward pass begins, the values of all weights of a plan are brought up to date at once: formats by one launch
for all of them, which reads the weights as they are now; noise held for a rollout (`held_noise.py`) by a comparison each,
and when a rollout is new, by one launch. What is left to a module is to look whether this pass is its own.

A weight is made ready after it has been read by the general path once: so kernels that a capture needs are on the GPU, weights
that nobody reads are neither made nor counted, and whatever is not plain (a shard, a parameter in another place, another
tap on the same weight) is met by code that knows it. A value holds while its parameter is the same object, at the same
address, and not written to since the pass began; else the module takes the general path in the middle of the pass. FSDP and
others that put weights in place while the model runs are seen by that.

A pass belongs to the thread that began it; its outermost frame is the proof, which no other thread has on its stack. Counting
is as ever: a format each time its module has read it in a call, a draw once. The price is a second copy of the weights that a
format is on, for as long as the plan is on the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaketable.faults import FaultBase
from shaketable.faults.gpu import batched
from shaketable.inject.counters import measure
from shaketable.inject.tap import Tap
from shaketable.inject.weights.held_noise import HeldTap, Origin
from shaketable.inject.weights.prepared_noise import DrawnWeights
from shaketable.sites.phases import current_rollout

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Frame
    from shaketable.inject.weights.on_read import WeightTap, WeightTaps


@dataclass(eq=False, slots=True)
class Ready:
    """The faulty value of one weight, and all that it holds for."""

    taps: WeightTaps
    name: str
    tap: Tap
    parameter: Tensor
    group: CodedWeights | Held
    address: int
    version: int = -1
    value: Tensor | None = None
    unread: bool = False
    """Whether it is to be counted when it is read."""

    def count(self) -> None:
        """It is read, and was not before."""
        self.unread = False
        self.group.count(self)

    def is_in_place(self) -> bool:
        """Whether the parameter's memory is where it was."""
        return self.parameter.data_ptr() == self.address


class CodedWeights:
    """Weights of one clause, type and device that a format is on."""

    each = True
    """Whether every call that reads a value counts."""

    def __init__(self, fault: FaultBase) -> None:
        self.fault = fault
        self.frame: Frame | None = None
        self.entries: list[Ready] = []
        self._launch: batched.CodedBatch | None = None
        self._seen: tuple[int, list[int]] | None = None

    def renew(self, frame: Frame) -> None:
        """Quantize every weight as it is now; once in a rollout, while nobody writes to them."""
        if not all(entry.is_in_place() for entry in self.entries):
            self.entries = [entry for entry in self.entries if entry.is_in_place()]
            self._launch = None
        if not self.entries:
            return
        rollout, versions = current_rollout(), [entry.parameter._version for entry in self.entries]
        if self._launch is None or rollout is None or self._seen != (rollout, versions):
            self._make(versions)
            self._seen = None if rollout is None else (rollout, versions)
        self.frame = frame

    def _make(self, versions: list[int]) -> None:
        if self._launch is None:
            with torch.inference_mode(False):
                for entry in self.entries:
                    entry.value = torch.empty_like(entry.parameter) if entry.value is None else entry.value
            pairs = [(e.parameter.detach(), e.value) for e in self.entries if e.value is not None]
            self._launch = batched.CodedBatch(self.fault, pairs)
        self._launch()
        for entry, version in zip(self.entries, versions, strict=True):
            entry.version = version

    def put(self, entry: Ready) -> None:
        """Add a weight."""
        self.entries.append(entry)
        self._launch = None

    def drop(self, entry: Ready) -> None:
        """Remove a weight."""
        if entry in self.entries:
            self.entries.remove(entry)
            self._launch = None

    def count(self, entry: Ready) -> None:
        """A module multiplies with it: a fire, measured like any other."""
        assert self.frame is not None
        assert entry.value is not None
        counters = entry.tap.injection.counters
        if counters.count(entry.tap, False, self.frame.current.phase):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                counters.add(entry.tap, False, measure(self.fault, entry.parameter.detach(), entry.value, None))
        entry.tap.injection.fires += 1

    def rest(self) -> None:
        """Nothing is to be read in this pass: its frame is not here."""

    def settle(self) -> None:
        """Nothing is told later."""


class Held:
    """Weights of one clause, type and device whose noise is held for a rollout."""

    each = False

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.entries: list[Ready] = []
        self.drawn = DrawnWeights()
        self._known: tuple[int, int, FaultBase] | None = None
        self._changes = -1
        self._parameters: list[Tensor] = []
        self._seen: list[Origin] = []

    def renew(self, frame: Frame) -> None:
        """See that every weight has the noise of this rollout; draw those that have not."""
        if frame.current.phase != "rollout":
            self.rest()
            return
        tap = self.entries[0].tap
        injection = tap.injection
        now, seen = (injection.step, injection.rollouts.number(), tap.fault), self._origins()
        known = self._known
        same = known is not None and known[2] is now[2] and known == now and not self._replaced()
        if not same or self._changes != injection.rollouts.changes or self._seen != seen:
            if self._see_moves():
                seen = self._origins()
            if self.entries:
                self.drawn.renew(self.entries, seen, now[2])
            self._known, self._changes, self._seen = now, injection.rollouts.changes, seen
        self.frame = frame

    def _origins(self) -> list[Origin]:
        """What `held_noise.py` knows weights by: here they are plain parameters, which have a version."""
        inference = torch.is_inference_mode_enabled()
        return [(p.data_ptr(), p._version, inference) for p in self._parameters]

    def _replaced(self) -> list[Ready]:
        """Weights in whose place their module has another parameter, or none."""
        return [e for e in self.entries if e.taps.parameter(e.name) is not e.parameter]

    def _see_moves(self) -> bool:
        """Let go of weights that are not where they were: the general path meets them again. Whether there were any."""
        replaced = self._replaced()
        moved = [e for e in self.entries if e in replaced or not e.is_in_place()]
        for entry in moved:
            self.drop(entry)
            entry.taps.forget(entry)
        return bool(moved)

    def rest(self) -> None:
        """Nothing is to be read in this pass."""
        if self._known is not None:
            self._known = None
            for entry in self.entries:
                entry.value = None

    def put(self, entry: Ready) -> None:
        """Add a weight."""
        self.entries.append(entry)
        self._parameters = [entry.parameter for entry in self.entries]
        self._known = None

    def drop(self, entry: Ready) -> None:
        """Remove a weight."""
        if entry in self.entries:
            self.entries.remove(entry)
            self._parameters = [entry.parameter for entry in self.entries]
            self._known = None

    def count(self, entry: Ready) -> None:
        """The first look at a draw: a fire, measured by what the kernel that drew it saw."""
        self.drawn.count(entry.tap)

    def settle(self) -> None:
        """Tell the ledger what draws changed."""
        self.drawn.settle()


class Gate:
    """Whose pass weights are ready for. All that a class of modules knows of it: classes may outlive it."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = 0
        """0 when there is none."""


class PreparedWeights:
    """The ready weights of one model of an injection."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.frame: Frame | None = None
        """The outermost frame of the pass that weights are ready for."""
        self.gate = Gate()
        self.kinds: dict[Any, Any] = {}
        """Classes of modules that look at this gate."""
        self._groups: dict[tuple[int, torch.dtype, torch.device], CodedWeights | Held] = {}

    def open(self, frame: Frame) -> None:
        """A pass begins. One of another thread that is still running keeps the weights; this one then does without."""
        here = threading.get_ident()
        if not self._groups or self.gate.thread not in (0, here):
            return
        self.close()
        if torch.is_grad_enabled() or frame.recomputing or frame.current.captured:
            return
        cast = torch.is_autocast_enabled("cuda")
        for group in self._groups.values():
            if group.entries and frame.current.acts_on(group.entries[0].tap) and not (cast and isinstance(group, CodedWeights)):
                group.renew(frame)
            else:
                group.rest()
        self.frame, self.gate.thread = frame, here

    def close(self) -> None:
        """The pass is over, or something has changed in the middle of it."""
        self.frame, self.gate.thread = None, 0
        for group in self._groups.values():
            group.frame = None

    def note(self, taps: WeightTaps, name: str, parameter: Tensor) -> None:
        """A weight has been read the general path: from the next pass on it can be ready."""
        known = taps.ready.get(name)
        if known is not None and known.parameter is parameter and known.is_in_place():
            return
        if known is not None:
            self.forget([known])
        (own,) = (own for own in taps.taps if own.name == name)
        if not _can_be(own, parameter):
            return
        tap = own.tap
        key = tap.clause, parameter.dtype, parameter.device
        if key not in self._groups:
            self._groups[key] = Held() if isinstance(tap, HeldTap) else CodedWeights(tap.fault)
        group = self._groups[key]
        entry = Ready(taps, name, tap, parameter, group, parameter.data_ptr())
        group.put(entry)
        taps.know(entry)

    def forget(self, entries: Iterable[Ready]) -> None:
        """These weights are not ours any more."""
        for entry in entries:
            entry.group.drop(entry)
            entry.taps.forget(entry)
        self._groups = {key: group for key, group in self._groups.items() if group.entries}

    def settle(self) -> None:
        """Tell the ledger what it has not been told."""
        for group in list(self._groups.values()):
            group.settle()


def _can_be(own: WeightTap, parameter: Tensor) -> bool:
    """Plain, on a GPU, hit forward only, by a kernel that takes many at once; or held."""
    tap = own.tap
    plain = type(parameter) is nn.Parameter and not parameter.is_inference() and is_on_gpu(parameter)
    if not plain or own.gradient_only or tap.transposed or tap.site.directions != ("forward",):
        return False
    return isinstance(tap, HeldTap) or (type(tap) is Tap and batched.codes(tap.fault, parameter))


def is_on_gpu(parameter: Tensor) -> bool:
    """Whether a parameter is on a CUDA device."""
    return parameter.is_cuda

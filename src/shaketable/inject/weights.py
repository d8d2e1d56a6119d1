"""Faulty weights that never replace the real ones, and noise that is held for a rollout.

A module with a weight tap gets a subclass of its own class (same name) in which the weight is a property. Inside the module's
forward the property is the faulty tensor, made when it is first read: FSDP2 replaces a shard by the whole weight in a hook of
its own, and a weight that is never read is not counted as hit. Elsewhere it is the parameter. `_parameters` is never written
to: optimizers, `state_dict`, tied modules, saving and other threads see the clean weight. `fully_shard` also changes the class
of a module: ours stays below its class.

**Held noise.** A sampler whose weights change at every token is not one noisy policy but a thousand. A held tap draws its
noise once per rollout, with the key (seed, place, step, number of the rollout in the step, rank). The clause is not in the
key, so arms that group their layers differently share their noise. Training forwards use the noise of the newest rollout of
the step. In a rollout without gradients the noisy weight is kept; elsewhere it is made again, because an optimizer may have
changed the weight. A draw is counted and measured once.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import PlanError
from shaketable.faults import FaultBase
from shaketable.faults.rng import key_of, mix64
from shaketable.inject import op
from shaketable.inject.counters import capturing
from shaketable.inject.modules import Hook, as_multiplied, is_product
from shaketable.inject.op import Application, Tap, apply
from shaketable.inject.passes import Entry, Frame, Pass
from shaketable.sites.phases import current_rollout

SLOT = "_shaketable_weights"
_REBUILD: Any = vars(copyreg)["_reconstructor"]
"""Python's own: a pickle that named a function of ours could not be read without us."""


@dataclass(frozen=True)
class WeightTap:
    """A tap on one parameter. As `gradient_only` it belongs to an operator: the weight is clean, its gradient is not."""

    name: str
    tap: Tap
    entry: Entry
    gradient_only: bool = False

    def touch(self, weight: Tensor, frame: Frame | None) -> Tensor:
        """The weight as the module sees it; without a frame, in a graph being traced."""
        if self.gradient_only:
            return self.tap.gradient(weight, frame, 1)
        if is_product(self.entry.module) and (frame is None or frame.current.acts_on(self.tap)):
            weight = as_multiplied(weight)
        return self.tap.touch(weight, frame)


@dataclass(frozen=True)
class _Call:
    """A call of the module that is running."""

    frames: list[tuple[WeightTap, Frame]]
    grad: bool
    """Whether the call is part of a graph: a module may read its weight, for its type say, where gradients are off."""
    values: dict[str, Tensor] = field(default_factory=dict)

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The faulty weight, made when it is asked for the first time."""
        if name not in self.values:
            value = parameter
            with torch.set_grad_enabled(self.grad):
                for own, frame in self.frames:
                    value = own.touch(_whole(value, own), frame) if own.name == name else value
            self.values[name] = value
        return self.values[name]


class WeightTaps(Hook):
    """The weight taps of one module, of all injections that are active on it."""

    def __init__(self, module: nn.Module) -> None:
        self.original: Any = type(module)
        self.subclass: Any = self.original
        """Its class with our properties."""
        self.taps: list[WeightTap] = []
        self.local = local()
        self.tracing = False
        self.hooks = [
            module.register_forward_pre_hook(self, with_kwargs=True),
            module.register_forward_hook(self, with_kwargs=True, always_call=True),
        ]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        """Forward pre-hook and forward hook."""
        if output:
            self.end()
        else:
            self.begin(args, kwargs)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called: note the frame in which it will read its weights."""
        if torch.compiler.is_compiling():
            self.tracing = True
            return
        found = ((own, own.tap.injection.frame(own.entry, args, kwargs)) for own in self.taps)
        frames = [(own, frame) for own, frame in found if frame is not None]
        self.local.call = _Call(frames, torch.is_grad_enabled())

    def end(self) -> None:
        """The module returns, or raises: forget its faulty weights."""
        if torch.compiler.is_compiling():
            self.tracing = False
            return
        self.local.__dict__.pop("call", None)

    def read(self, name: str, parameter: Tensor) -> Tensor:
        """What the module sees when it reads its weight."""
        if torch.compiler.is_compiling():
            if self.tracing:
                for own in self.taps:
                    if own.name == name and op.is_present(own.tap.handle):
                        parameter = own.touch(parameter, None)
            return parameter
        call: _Call | None = self.local.__dict__.get("call")
        if call is None and self.tracing:
            call = self._between_graphs()
        return parameter if call is None else call.value(name, parameter)

    def _between_graphs(self) -> _Call | None:
        """The call of a compiled module, for functions that dynamo leaves out of its graphs; one per pass."""
        frames = [(own, frame) for own in self.taps if (frame := own.tap.injection.frame_between_graphs()) is not None]
        known: _Call | None = self.local.__dict__.get("between")
        if known is None or [frame.current for _, frame in known.frames] != [frame.current for _, frame in frames]:
            known = self.local.between = _Call(frames, torch.is_grad_enabled())
        return known if frames else None


def _whole(weight: Tensor, own: WeightTap) -> Tensor:
    """The weight itself; raises where a module multiplies with a shard, whose noise would not be the weight's."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(weight, tensors.DTensor):
        raise PlanError(
            f"{own.tap.site.label}: {own.tap.name} is still sharded when it is used (tensor parallel, or called past FSDP2's "
            "root); weight faults act on whole weights"
        )
    return weight


def add_tap(module: nn.Module, tap: WeightTap) -> None:
    """Make the module read a parameter through a tap."""
    found = module.__dict__.get(SLOT)
    if found is None:
        found = WeightTaps(module)
        module.__dict__[SLOT] = found
    found.taps.append(tap)
    _set_class(module, found)


def remove_taps(module: nn.Module, taps: set[Tap]) -> None:
    """Take taps off; the last one gives the module its own class back."""
    found: WeightTaps | None = module.__dict__.get(SLOT)
    if found is None:
        return
    found.taps = [t for t in found.taps if t.tap not in taps]
    _set_class(module, found)
    if not found.taps:
        for hook in found.hooks:
            hook.remove()
        del module.__dict__[SLOT]


def _set_class(module: nn.Module, found: WeightTaps) -> None:
    """The class in which the tapped weights are properties, or the module's own when there are none."""
    names = tuple(sorted({t.name for t in found.taps}))
    kind: Any = _with_properties(found.original, names) if names else found.original
    now: Any = type(module)
    module.__class__ = _exchanged(now, found.subclass, kind)
    found.subclass = kind


# ---- the class of a module while its weights are faulty


@functools.cache
def _with_properties(original: Any, names: tuple[str, ...]) -> Any:
    """A subclass that looks like the class itself; copies and pickles are of that class, and clean."""

    def reduce(self: Any, protocol: Any) -> Any:
        state: Any = original.__reduce_ex__(self, protocol)[2]
        return _REBUILD, (original, object, None), {k: v for k, v in state.items() if not k.startswith(SLOT)}

    body: dict[str, Any] = {name: _property(name) for name in names}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), body | {"__reduce_ex__": reduce})


def _property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        if name not in self._parameters:
            raise AttributeError(name)  # it was deleted; torch makes the message
        parameter = self._parameters[name]
        taps: WeightTaps | None = self.__dict__.get(SLOT)
        return parameter if taps is None or parameter is None else taps.read(name, parameter)

    def write(self: nn.Module, value: Any) -> None:
        raise AttributeError(f"{name} cannot be replaced by a plain tensor while a plan acts on it")

    return property(read, write)


def _exchanged(kind: Any, old: Any, new: Any) -> Any:
    """`kind` with `new` in the place of `old`, also below a class that `fully_shard` has made of it meanwhile."""
    return new if kind is old else _rebuilt(kind, old, new)


@functools.cache
def _rebuilt(kind: Any, old: Any, new: Any) -> Any:
    bases = tuple(_exchanged(base, old, new) if old in base.__mro__ else base for base in kind.__bases__)
    body = {k: v for k, v in kind.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, body)


# ---- noise that is held for a rollout


class Rollouts:
    """The rollouts that the models of one injection took part in."""

    def __init__(self) -> None:
        self.total = 0
        self._numbers: dict[int, int] = {}
        self._newest: int | None = None
        self._lock = Lock()

    def begin_step(self) -> None:
        with self._lock:
            self._numbers.clear()

    def number(self) -> int:
        """Which rollout of the step this is; outside of rollouts, the newest one."""
        now = current_rollout()
        if now is None:
            return max(len(self._numbers) - 1, 0)
        if now not in self._numbers:
            with self._lock:
                self.total += now != self._newest
                self._newest = now
                self._numbers.setdefault(now, len(self._numbers))
        return self._numbers[now]


Origin = tuple[int, int, bool]
"""Which weight: its address, its version, and whether inference mode is on."""


class HeldTap(Tap):
    """A fault on a weight, drawn once per rollout."""

    is_held = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._home: Tensor | None = None
        """Where noisy weights are on a GPU: one place, because captured graphs keep reading it."""
        self._kept: tuple[tuple[int, FaultBase, Origin], Tensor] | None = None
        """The noisy weight, and what it was made from."""
        self._counted: dict[str, tuple[int, FaultBase]] = {}

    def make_keys(self) -> None:
        super().make_keys()
        self.place = key_of(self.injection.plan.seed, "held", self.name, self.injection.rank)

    @property
    def reads_tables(self) -> bool:  # type: ignore[override]
        """Only for gradients: a weight has its noise before a graph is captured, which reads it and nothing else."""
        return self.site.directions != ("forward",)

    def forget(self) -> None:
        """The weight is another one: its next draw counts, and is measured, whatever its key."""
        self._counted.clear()

    def key(self, current: Pass, backward: bool, use: int) -> int:
        """The key of the draw that holds now; gradients have keys of their own."""
        return super().key(current, backward, use) if backward else mix64(self.place ^ self._draw_number())

    def _draw_number(self) -> int:
        """Step and rollout in 64 bits: the same for all held taps of an injection."""
        return mix64(mix64(self.injection.calls.step) + self.injection.rollouts.number())

    def forward(self, x: Tensor, frame: Frame | None) -> Tensor:
        if frame is None:
            return super().forward(x, None)
        current = frame.current
        acts = current.acts_on(self) and not self.fault.is_off
        if not acts or current.phase != "rollout" or (x.requires_grad and torch.is_grad_enabled()):
            self._kept = None
            return super().forward(x, frame) if acts else x
        made_from = self.place ^ self._draw_number(), self.fault, _identity(x)
        if self._kept is None or self._kept[0] != made_from:
            self._kept = made_from, self._renewed(x, frame)
        return self._kept[1]

    def written(self, x: Tensor, phase: str) -> Tensor:
        """The weight with the noise of the draw that holds now, for whoever writes it into memory."""
        current = Pass(self.injection, phase, 0, self.injection.acting(phase), tuple(self.injection.faults))
        return apply(x, Application(self, current, False, 0, 0))

    def _renewed(self, x: Tensor, frame: Frame) -> Tensor:
        """The noisy weight of a new rollout."""
        if x.is_cuda and capturing():
            raise PlanError(f"{self.site.label}: read the prompt before a graph is captured: {self.name} has no noise yet")
        value = super().forward(x, frame)
        if not x.is_cuda:
            return value
        home = self._home
        if home is None or home.shape != x.shape or home.dtype != x.dtype or home.device != x.device:
            with torch.inference_mode(False):
                home = self._home = torch.empty_like(x)
        return home.copy_(value)

    def is_fire(self, what: Application) -> bool:
        if what.backward:
            return True
        phase, draw = what.current.phase, (what.key, what.fault)
        is_new = self._counted.get(phase) != draw
        self._counted[phase] = draw
        return is_new


def _identity(x: Tensor) -> Origin:
    """Another one when the weight was moved or written to; writes through `.data` show at the next rollout."""
    return x.data_ptr(), 0 if x.is_inference() else x._version, torch.is_inference_mode_enabled()

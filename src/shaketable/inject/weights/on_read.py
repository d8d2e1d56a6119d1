"""Faulty weights that never replace the real ones.

A module with a weight tap gets a subclass of its own class (same name) in which the weight is a property. Outside the
module's forward the property is the parameter itself; inside, it is the faulty tensor, made from the parameter by an
autograd function. `_parameters` is never written to: optimizers, `state_dict`, tied modules, saving and other threads
see the clean parameter at every moment, so there is nothing to restore and nothing to forget to restore.

The faulty tensor is made when the module first reads its weight, not when it is called. FSDP2 and others put the whole weight
in the place of a shard by a hook of their own, and between hooks the order is a matter of luck; whoever computes reads last.
So the fault acts on the weight that is multiplied with, FSDP2's reduction of its gradient goes on as ever, and a weight that
the module never looks at is not counted as hit. `fully_shard` also changes the class of a module: ours stays below its own,
and when the plan leaves, ours is taken out from under it.

Rejected: swapping the tensor before forward and back after it (the gradient is then computed with another weight than
the forward used, a raised exception leaves the noise in, and threads see each other's weights), and
torch.nn.utils.parametrize (it renames the parameter, so checkpoints and optimizers see another model). Rejected too: keeping
a quantized weight until it changes. Writes through `.data`, the usual way to sync a sampler, leave no trace to notice.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import PlanError
from shaketable.inject.compile import custom_ops
from shaketable.inject.hooks.base import Hook
from shaketable.inject.hooks.module_tensors import as_multiplied, is_product
from shaketable.inject.pass_context import Entry, Frame
from shaketable.inject.tap import Tap

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

    def touch(self, weight: Tensor, frame: Frame) -> Tensor:
        """The weight as the module sees it."""
        if not self.gradient_only and frame.current.acts_on(self.tap) and is_product(self.entry.module):
            weight = as_multiplied(weight)
        return self.tap.gradient(weight, frame, 1) if self.gradient_only else self.tap.touch(weight, frame)

    def trace(self, weight: Tensor) -> Tensor:
        """The same, for a graph being compiled."""
        if not self.gradient_only:
            if is_product(self.entry.module) and custom_ops.is_present(self.tap.handle):
                weight = as_multiplied(weight)
            return custom_ops.trace(weight, self.tap)
        handle = self.tap.handle
        return custom_ops.trace_gradient(weight, handle, 1, None, False) if custom_ops.is_present(handle) else weight


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


class WeightTaps:
    """The weight taps of one module, of all injections that are active on it."""

    def __init__(self, module: nn.Module) -> None:
        self.original: Any = type(module)
        self.subclass: Any = self.original
        """Its class with our properties."""
        self.taps: list[WeightTap] = []
        self.local = local()
        self.tracing = False
        self.hooks = [
            module.register_forward_pre_hook(_Around(self), with_kwargs=True),
            module.register_forward_hook(_Around(self), with_kwargs=True, always_call=True),
        ]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called: note in which frame, for when it reads its weights."""
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
                    if own.name == name:
                        parameter = own.trace(parameter)
            return parameter
        call: _Call | None = self.local.__dict__.get("call")
        return parameter if call is None else call.value(name, parameter)


def _whole(weight: Tensor, own: WeightTap) -> Tensor:
    """The weight itself; raises where a module multiplies with a shard, whose noise would not be the weight's."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(weight, tensors.DTensor):
        raise PlanError(
            f"{own.tap.site.label}: {own.tap.name} is still sharded when it is used (tensor parallel, or called past FSDP2's "
            "root); weight faults act on whole weights"
        )
    return weight


class _Around(Hook):
    """Forward pre-hook and forward hook of a module with weight taps."""

    def __init__(self, taps: WeightTaps) -> None:
        self.taps = taps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        if output:
            self.taps.end()
        else:
            self.taps.begin(args, kwargs)


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

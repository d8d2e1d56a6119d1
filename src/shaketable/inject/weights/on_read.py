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

On a GPU, where no gradient is wanted, most weights are made ready when the pass begins (`prepared.py`), and nothing of the
above happens per module. Hooks alone would cost more there than many a module, so a module on a GPU has none: its subclass
has a forward that does what they do, and sees to it that values which are ready are read.

Rejected: swapping the tensor before forward and back after it (the gradient is then computed with another weight than
the forward used, a raised exception leaves the noise in, and threads see each other's weights), and
torch.nn.utils.parametrize (it renames the parameter, so checkpoints and optimizers see another model). Rejected too: keeping
a quantized weight until it changes. Writes through `.data`, the usual way to sync a sampler, leave no trace to notice.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident, local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.errors import PlanError
from shaketable.inject.compile import custom_ops
from shaketable.inject.hooks.base import Hook
from shaketable.inject.hooks.module_tensors import as_multiplied, is_product
from shaketable.inject.hooks.subclasses import exchanged, on_gpu
from shaketable.inject.pass_context import Entry, Frame
from shaketable.inject.tap import Tap
from shaketable.inject.weights.property_classes import SLOT, kind_of

if TYPE_CHECKING:
    from shaketable.inject.weights.prepared import PreparedWeights, Ready


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
        self.module = weakref.ref(module)
        self.original: Any = type(module)
        self.subclass: Any = self.original
        """Its class with our properties."""
        self.taps: list[WeightTap] = []
        self.local = local()
        self.tracing = False
        self.fell_back = False
        """Whether the call that `inside` is about has taken the general path after all."""
        self.ready: dict[str, Ready] = {}
        self.prepared: PreparedWeights | None = None
        """Where values are made ready; None where several plans act on the module."""
        self.each: list[Ready] = []
        """Those of them that every call counts."""
        self.inside = 0
        """The thread in which the module is running, in a pass that has values ready; else 0."""
        self.is_fast = on_gpu(module) and "forward" not in module.__dict__
        self.hooks = [] if self.is_fast else self._hooked(module)

    def _hooked(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(_Around(self), with_kwargs=True),
            module.register_forward_hook(_Around(self), with_kwargs=True, always_call=True),
        ]

    def around(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, the general path."""
        self.begin(args, kwargs)
        if torch.compiler.is_compiling():
            result = forward(module, *args, **kwargs)
            self.end()
            return result
        try:
            return forward(module, *args, **kwargs)
        finally:
            self.end()

    def parameter(self, name: str) -> Tensor | None:
        """The clean weight."""
        module = self.module()
        return None if module is None else module._parameters.get(name)

    def know(self, entry: Ready) -> None:
        """From now on a value may be ready."""
        self.ready[entry.name] = entry
        self.each = [found for found in self.ready.values() if found.group.each]
        if (module := self.module()) is not None:
            module.__dict__[SLOT + entry.name] = entry

    def forget(self, entry: Ready) -> None:
        """From now on it is made when it is read."""
        if self.ready.get(entry.name) is entry:
            del self.ready[entry.name]
            self.each = [found for found in self.ready.values() if found.group.each]
            if (module := self.module()) is not None:
                del module.__dict__[SLOT + entry.name]

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
        if call is None and self.inside == get_ident():
            self.fell_back = True
            self.begin((), {})
            call = self.local.call
        if call is None:
            return parameter
        value = call.value(name, parameter)
        if self.prepared is not None and value is not parameter and not torch.is_grad_enabled():
            self.prepared.note(self, name, parameter)
        return value


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
    for slot in ("_shaketable_fast_linear",):
        if (fast := module.__dict__.get(slot)) is not None:
            fast.become_hook()
    found = module.__dict__.get(SLOT)
    if found is None:
        found = WeightTaps(module)
        module.__dict__[SLOT] = found
    found.taps.append(tap)
    _shelve(found)
    _set_class(module, found)


def remove_taps(module: nn.Module, taps: set[Tap]) -> None:
    """Take taps off; the last one gives the module its own class back."""
    found: WeightTaps | None = module.__dict__.get(SLOT)
    if found is None:
        return
    found.taps = [t for t in found.taps if t.tap not in taps]
    _shelve(found)
    _set_class(module, found)
    if not found.taps:
        for hook in found.hooks:
            hook.remove()
        del module.__dict__[SLOT]


def has_taps(module: nn.Module) -> bool:
    """Whether any plan acts on a weight of this module."""
    return SLOT in module.__dict__


def _set_class(module: nn.Module, found: WeightTaps) -> None:
    """The class in which the tapped weights are properties, or the module's own when there are none."""
    names = tuple(sorted({t.name for t in found.taps}))
    kind: Any = kind_of(found, names) if names else found.original
    now: Any = type(module)
    module.__class__ = exchanged(now, found.subclass, kind)
    found.subclass = kind


def rebase(module: nn.Module, old: Any, new: Any) -> None:
    """Exchange a class that lies below ours."""
    found: WeightTaps | None = module.__dict__.get(SLOT)
    if found is None:
        now: Any = type(module)
        module.__class__ = exchanged(now, old, new)
        return
    found.original = exchanged(found.original, old, new)
    _set_class(module, found)


def _shelve(found: WeightTaps) -> None:
    """Values can be ready where one tap acts on each weight, all of one plan."""
    if found.prepared is not None:
        found.prepared.forget(list(found.ready.values()))
    names, owners = [own.name for own in found.taps], {own.tap.injection.prepared_of(own.entry.owner) for own in found.taps}
    alone = found.is_fast and len(owners) == 1 and len(set(names)) == len(names)
    found.prepared = owners.pop() if alone else None

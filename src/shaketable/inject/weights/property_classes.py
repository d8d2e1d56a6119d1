"""The classes in which the weights of a module are properties: see `on_read.py`.

Three of them. Beside hooks, properties are all. On a GPU the forward is ours too: it does what hooks would do, or, in a pass
that has values ready, lets the properties hand those out; so whoever looks from a hook of the module sees the clean weight
there. And where everything on the module is held for rollouts, of which there is one at each norm and little time, forward
and properties ask nothing but whose pass is running: there whoever looks at a weight in the middle of that pass, in its
thread, sees the noisy one.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shaketable.inject.hooks.subclasses import lookalike
from shaketable.inject.weights.held_noise import HeldTap

if TYPE_CHECKING:
    from shaketable.inject.weights.on_read import WeightTaps
    from shaketable.inject.weights.prepared import Gate, Ready

SLOT = "_shaketable_weights"
is_dynamo_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled


def kind_of(found: WeightTaps, names: tuple[str, ...]) -> Any:
    """The class for a module; where all its faults are held, one that knows whose pass is running."""
    prepared = found.prepared
    if prepared is None or not all(isinstance(own.tap, HeldTap) for own in found.taps):
        return _subclass(found.original, names, found.is_fast)
    key = (found.original, names)
    if key not in prepared.kinds:
        body: dict[str, Any] = {name: _held_reader(name, prepared.gate) for name in names}
        body["forward"] = _held_forward(found.original, prepared.gate)
        prepared.kinds[key] = lookalike(found.original, SLOT, body)
    return prepared.kinds[key]


def _held_forward(original: Any, gate: Gate) -> Any:
    """The forward of a class whose weights are held: when they are ready, nothing is to be done, and nothing is touched."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and gate.thread == get_ident() and not is_grad_enabled():
            return original.forward(self, *args, **kwargs)
        taps: WeightTaps | None = self.__dict__.get(SLOT)
        if taps is None:
            return original.forward(self, *args, **kwargs)
        return taps.around(self, original.forward, args, kwargs)

    return forward


def _held_reader(name: str, gate: Gate) -> property:
    """Where many modules are read, each object that has to be looked at is a miss of the cache: there is one."""
    slow, slot = _reader(name), SLOT + name
    assert slow.fget is not None
    otherwise = slow.fget

    def read(self: nn.Module) -> Any:
        if is_dynamo_compiling() or gate.thread != get_ident() or is_grad_enabled():
            return otherwise(self)
        found: Ready | None = self.__dict__.get(slot)
        if found is None or found.value is None:
            return _made_now(self, name)
        if found.unread:
            found.count()
        return found.value

    return property(read, slow.fset)


def _made_now(module: nn.Module, name: str) -> Any:
    """A held weight that is not ready, in a pass that has others ready: drawn the general path, and kept like those."""
    taps: WeightTaps | None = module.__dict__.get(SLOT)
    parameter = module._parameters.get(name)
    if taps is None or parameter is None:
        return parameter
    taps.begin((), {})
    try:
        return taps.read(name, parameter)
    finally:
        taps.end()


@functools.cache
def _subclass(original: type[nn.Module], names: tuple[str, ...], is_fast: bool) -> Any:
    body: dict[str, Any] = {name: _reader(name) for name in names}
    return lookalike(original, SLOT, body | {"forward": _forward(original)} if is_fast else body)


def _forward(original: Any) -> Any:
    """The forward of a class on a GPU."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        taps: WeightTaps | None = self.__dict__.get(SLOT)
        if taps is None:
            return original.forward(self, *args, **kwargs)
        prepared = taps.prepared
        if is_dynamo_compiling() or prepared is None or prepared.gate.thread != (here := get_ident()) or is_grad_enabled():
            return taps.around(self, original.forward, args, kwargs)
        taps.inside = here
        for found in taps.each:
            found.unread = True
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            taps.inside = 0
            if taps.fell_back:
                taps.fell_back = False
                taps.end()

    return forward


def _reader(name: str) -> property:
    def read(self: nn.Module) -> Any:
        if name not in self._parameters:
            raise AttributeError(name)  # it was deleted; torch makes the message
        parameter = self._parameters[name]
        taps: WeightTaps | None = self.__dict__.get(SLOT)
        if taps is None or parameter is None:
            return parameter
        found = taps.ready.get(name) if taps.inside else None
        if found is None or found.parameter is not parameter or parameter._version != found.version:
            return taps.read(name, parameter)
        if found.value is None or found.group.frame is None or parameter.data_ptr() != found.address:
            return taps.read(name, parameter)
        if taps.inside != get_ident():
            return taps.read(name, parameter)
        if found.unread:
            found.count()
        return found.value

    def write(self: nn.Module, value: Any) -> None:
        raise AttributeError(f"{name} cannot be replaced by a plain tensor while a plan acts on it")

    return property(read, write)

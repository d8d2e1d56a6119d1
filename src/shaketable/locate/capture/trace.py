"""One forward of the whole model, kept as one call per decoder layer, and the operators outside of the layers.

Every later probe is teacher-forced: a layer is called again with exactly what it was given here, so that a fault
upstream never flags a healthy layer downstream. What is kept is a layer's input, arguments and output; what happens
inside of a layer is recorded later, one layer at a time, and forgotten again, so memory grows with one layer, not with
the model.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import ModelError
from shaketable.locate.capture.recorder import Recorder, Recording, snapshot
from shaketable.locate.capture.reference import Reference
from shaketable.sites.nested_tensors import map_tensors, tensors_of
from shaketable.sites.structure import find_layers


@dataclass
class LayerCall:
    """A decoder layer with what it was given and what it returned."""

    index: int
    name: str
    """Path in the model."""
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    overwrites: bool = False
    """Whether it writes into what it is given."""

    @property
    def x(self) -> Tensor:
        """The hidden states it was given."""
        return hidden(self.args, self.kwargs, self.y)

    @property
    def y(self) -> Tensor:
        """The hidden states it returned."""
        return next(tensors_of(self.output))

    def again(self, x: Tensor | None = None) -> Any:
        """Call the layer with the same arguments, and other hidden states if given.

        Layers may write into a container they are given, keys and values for later layers, or into the hidden states
        themselves: each call gets its own.
        """
        given = (self.args, self.kwargs) if x is None else with_hidden(self.args, self.kwargs, self.x, x)
        args, kwargs = map_tensors(given, torch.clone) if self.overwrites else snapshot(given)
        with torch.no_grad():
            return self.module(*args, **kwargs)


@dataclass
class Trace:
    """One forward."""

    calls: list[LayerCall]
    outside: Recording
    logits: Tensor


def hidden(args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
    """A layer's hidden states: what it is given first of its result's shape, wherever its author put it."""
    given = list(tensors_of((args, kwargs)))
    return next((t for t in given if t.shape == y.shape and t.is_floating_point()), given[0])


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with other hidden states."""
    changed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), lambda tensor: x if tensor is old else tensor)
    return changed


def forward(model: nn.Module, ids: Tensor) -> Tensor:
    """A plain forward. Not every model takes `use_cache`, or names what it is given and returns as most do."""
    takes = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    named = {"use_cache": False} if takes_any or "use_cache" in takes else {}
    with torch.no_grad():
        found = model(input_ids=ids, **named) if takes_any or "input_ids" in takes else model(ids, **named)
    logits = found["logits"] if type(found) is dict else found.logits if hasattr(found, "logits") else first_tensor(found)
    assert isinstance(logits, Tensor)
    return logits


def first_tensor(found: Any) -> Any:
    """What a model returns that returns no record with a field for its logits: they are its result, or come first."""
    return found[0] if type(found) is tuple else found


def trace(model: nn.Module, ids: Tensor, reference: Reference) -> Trace:
    """Run the model once and keep what each layer was given and returned."""
    layers, paths = find_layers(model)
    places = {id(layer): i for i, layer in enumerate(layers)}
    recorder = Recorder(model, lambda path, module: id(module) in places or reference.leaf(path) is not None)
    with recorder.watching() as recording:
        logits = forward(model, ids)
    calls: dict[int, LayerCall] = {}
    for record in recording.records:
        module = model.get_submodule(record.path)
        if record.func is None and id(module) in places:
            index = places[id(module)]
            if index in calls:
                raise ModelError(f"{record.path} is called more than once in a forward; locate follows one call per layer")
            calls[index] = LayerCall(index, record.path, module, record.args, record.kwargs, record.output, record.overwrites)
    if len(calls) != len(layers):
        missing = next(path for i, path in enumerate(paths) if i not in calls)
        raise ModelError(f"{missing} was not called in a forward")
    return Trace([calls[i] for i in range(len(layers))], recording, logits)


def record_layer(call: LayerCall, reference: Reference, x: Tensor | None = None) -> Recording:
    """Call a layer again and record every operator."""
    recorder = Recorder(call.module, lambda path, module: reference.leaf(f"{call.name}.{path}") is not None)
    with recorder.watching() as recording:
        call.again(x)
    return recording

"""One forward of the whole model, kept as one call per decoder layer, and the operators outside of the layers.

Every later probe is teacher-forced: a layer is called again with exactly what it was given here, so that a fault
upstream never flags a healthy layer downstream. What is kept is a layer's input, arguments and output; what happens
inside of a layer is recorded later, one layer at a time, and forgotten again, so memory grows with one layer, not with
the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.model_call import Arguments, call_with_tokens, logits_of
from shaketable.capture.recorder import Recorder, Recording, copied, main_result, snapshot
from shaketable.capture.reference import Reference
from shaketable.errors import ModelError
from shaketable.sites.nested_tensors import tensors_of


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
    """Whether it writes into its arguments."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that it was called with in the place of its parameters."""

    @property
    def x(self) -> Tensor:
        """The hidden states it was given."""
        return hidden(self.args, self.kwargs, self.y)

    @property
    def y(self) -> Tensor:
        """The hidden states it returned."""
        return main_result(self.output)

    def again(self, x: Tensor | None = None) -> Any:
        """Call the layer with the same arguments, and other hidden states if given.

        Layers may write into a container they are given, keys and values for later layers, or into the hidden states
        themselves: each call gets its own.
        """
        given = (self.args, self.kwargs) if x is None else with_hidden(self.args, self.kwargs, self.x, x)
        args, kwargs = copied(given, torch.clone) if self.overwrites else snapshot(given)
        with _in_the_open(), torch.inference_mode() if self.x.is_inference() else nullcontext():
            if self.weights:
                return torch.func.functional_call(self.module, self.weights, args, kwargs)
            return self.module(*args, **kwargs)


@dataclass
class Trace:
    """One forward."""

    calls: list[LayerCall]
    outside: Recording
    logits: Tensor
    answer: Any
    """All that the model returned."""


@contextmanager
def _in_the_open() -> Iterator[None]:
    """No gradients, and no way around the modules: torch's own layers take one unless somebody watches them."""
    switch = torch.backends.mha
    was = switch.get_fastpath_enabled()
    switch.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        switch.set_fastpath_enabled(was)


def hidden(args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
    """A layer's hidden states: what it is given first of its result's shape, wherever its author put it."""
    given = list(tensors_of((args, kwargs.get("hidden_states"), kwargs)))
    if not given:
        raise ModelError("a layer is given no hidden states; locate needs a tensor among its arguments")
    return next((t for t in given if t.shape == y.shape and t.is_floating_point()), given[0])


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with other hidden states, and caches of their own."""
    changed: tuple[tuple[Any, ...], dict[str, Any]] = copied((args, kwargs), lambda tensor: x if tensor is old else tensor)
    return changed


def forward(model: nn.Module, ids: Tensor, arguments: Arguments | None = None) -> Tensor:
    """The logits of a plain forward."""
    with _in_the_open():
        return logits_of(_call(model, ids, arguments), model)


def _call(model: nn.Module, ids: Tensor, arguments: Arguments | None) -> Any:
    """The model's answer; a cache among the arguments stays as it is."""
    return call_with_tokens(model, ids, copied(dict(arguments), torch.clone) if arguments else arguments)


def trace(model: nn.Module, ids: Tensor, reference: Reference, arguments: Arguments | None = None) -> Trace:
    """Run the model once and keep what each layer was given and returned."""
    layers, paths = reference.layers, reference.paths
    places = {id(layer): i for i, layer in enumerate(layers)}
    recorder = Recorder(model, lambda path, module: id(module) in places or reference.leaf(path) is not None)
    with recorder.watching() as recording, _in_the_open():
        answer = _call(model, ids, arguments)
        logits = logits_of(answer, model)
    calls: dict[int, LayerCall] = {}
    for record in recording.records:
        module = model.get_submodule(record.path)
        if record.func is None and id(module) in places:
            index = places[id(module)]
            if index in calls:
                raise ModelError(f"{record.path} is called more than once in a forward; locate follows one call per layer")
            given = (record.args, record.kwargs, record.output, record.overwrites, record.weights)
            calls[index] = LayerCall(index, record.path, module, *given)
    if len(calls) != len(layers):
        missing = next(path for i, path in enumerate(paths) if i not in calls)
        raise ModelError(f"{missing} was not called in a forward")
    return Trace([calls[i] for i in range(len(layers))], recording, logits, answer)


def record_layer(call: LayerCall, reference: Reference, x: Tensor | None = None) -> Recording:
    """Call a layer again and record every operator."""
    recorder = Recorder(call.module, lambda path, module: reference.leaf(f"{call.name}.{path}") is not None)
    with recorder.watching() as recording:
        call.again(x)
    return recording

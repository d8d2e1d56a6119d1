"""One forward of the whole model, kept as one call per decoder layer, and the operators outside of the layers.

Every later probe is teacher-forced: a layer is called again with exactly the arguments it had here, so that a fault upstream
never flags a healthy layer downstream. Only inputs, arguments and outputs of layers are kept; their operators are recorded
later, one layer at a time, so memory grows with one layer and not with the model.

Hugging Face's models take `input_ids` and return an object. Any other model takes tokens as its first argument and returns a
tensor, a tuple, a mapping or an object. Tokens are one sequence: padding would put masked positions into every probe. The
built-in text mixes prose, numbers, code and other scripts, so that many channels of a model are in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import Recorder, Recording, all_tensors, copied, main_result, snapshot
from shaketable.capture.reference import Reference
from shaketable.errors import ModelError, ShaketableError
from shaketable.sites.nested_tensors import tensors_of

Arguments = Mapping[str, Any]
"""Arguments of a model besides tokens, by name."""
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def call_with_tokens(model: nn.Module, ids: Tensor, arguments: Arguments | None = None) -> Any:
    """Call a model with token ids: as `input_ids` where forward takes that, and as the first argument where it does not."""
    parameters = inspect.signature(model.forward).parameters
    named = {name for name, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    first = next((p for p in parameters.values() if p.kind in BY_POSITION), None)
    given: dict[str, Any] = {}
    by_name = "input_ids" in named or (takes_any and first is None)
    if "use_cache" in named or (by_name and takes_any):
        given["use_cache"] = False
    given |= arguments or {}
    return model(input_ids=ids, **given) if by_name else model(ids, **given)


def logits_of(answer: Any, model: nn.Module) -> Tensor:
    """The logits in what a model returned.

    In an object or a mapping they have that name. In a tuple they are the one tensor of numbers, or the one with a channel
    for each row of an embedding; what lies deeper (a cache, states) is not looked at, nor is a single number, such as a loss.
    """
    if isinstance(answer, Mapping):
        answer = answer.get("logits", {**answer})
    answer = getattr(answer, "logits", answer)
    members = answer if isinstance(answer, tuple | list) else (answer,)
    found = [m for m in members if isinstance(m, Tensor) and m.is_floating_point() and m.dim() > 1]
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    fitting = found if len(found) == 1 else [m for m in found if m.shape[-1] in sizes]
    if len(fitting) == 1:
        return fitting[0]
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_of(answer)) or f"a {type(answer).__name__}"
    raise ModelError(
        f"a plain forward of {type(model).__name__} fails to give logits: it returns {shapes}; "
        "let it return a floating-point tensor, or something with `logits` in it"
    )


# ---- prompts


TEXT = """\
A shake table is what engineers put a building on to see which floor cracks in an earthquake. In 1995 the table in Miki
moved 1,200 tonnes at 0.9 g for 20 seconds; the third floor failed first. What is 37 + 58? The answer is 95, because
30 + 50 = 80 and 7 + 8 = 15.

def mean(values: list[float]) -> float:
    return sum(values) / len(values)  # fails on an empty list

Das Haus steht noch, sagte sie, und zählte die Risse. La tour penche, mais elle ne tombe pas. 建物は揺れたが、倒れなかった。
The report says: "no damage above level 2", yet the sensors at levels 7, 9 and 11 disagree by 3.4e-2. If all bolts are
sound and every beam is straight, then either the table lied or the sensors did. Which one would you check first, and why?
First, repeat the test with nothing changed. Second, turn the table around. Third, take a second set of sensors, and put
them where the first ones were. A fault that stays with the place is in the building; one that moves with the sensor is not.
"""


def read_prompts(path: Path) -> list[str]:
    """One prompt per line of a text file; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ShaketableError(f"prompts cannot be read from {path}: {error}") from error
    return [line for line in lines if line.strip()]


def token_batch(tokenizer: Any, prompts: Sequence[str] | None, tokens: int) -> Tensor:
    """One sequence (1, n) of at most so many tokens, from the built-in text or from prompts joined by newlines."""
    if tokenizer is None:
        raise ShaketableError("there is no tokenizer to make tokens with; give one, or token ids")
    if prompts is not None and not any(p.strip() for p in prompts):
        raise ShaketableError("the prompts are empty; give at least one line of text")
    text = TEXT * (1 + tokens // 64) if prompts is None else "\n".join(p for p in prompts if p.strip())
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    if len(ids) < 2:
        raise ShaketableError(f"the prompts make {len(ids)} tokens; at least 2 are needed")
    return torch.tensor([ids])


def one_sequence(ids: Tensor) -> Tensor:
    """These token ids, if they are one sequence of at least two."""
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ShaketableError(f"input_ids has shape {tuple(ids.shape)}; give one sequence of at least 2 tokens, (1, n)")
    return ids


# ---- the model as it is judged


def unwrapped(model: Any) -> nn.Module:
    """The model inside of torch.compile's, DataParallel's and DDP's wrappers."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; give a loaded model, such as shaketable.load_model returns")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = model._modules.get("module" if isinstance(model, wrappers) else "_orig_mod")
    return model if inner is None else unwrapped(inner)


@contextmanager
def as_deployed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no autocast, nothing compiled; every module's mode comes back, and every wrapper of torch.compile."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    compiled = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "_orig_mod" in child._modules
    ]
    for parent, name, child in compiled:
        parent._modules[name] = child._modules["_orig_mod"]
    device = next(model.parameters()).device.type
    try:
        with torch.autocast(device, enabled=False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
        for parent, name, child in compiled:
            parent._modules[name] = child


# ---- trace


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
    autocast: torch.dtype | None = None
    """The dtype of the autocast that the model puts around it."""

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
        given = (self.args, self.kwargs)
        if x is not None:  # caches of its own, too
            old = self.x
            given = copied(given, lambda tensor: x if tensor is old else tensor)
        args, kwargs = copied(given, torch.clone) if self.overwrites else snapshot(given)
        autocast = torch.autocast(self.x.device.type, self.autocast, enabled=self.autocast is not None)
        with _without_shortcuts(), autocast, torch.inference_mode() if self.x.is_inference() else nullcontext():
            return self.module(*args, **kwargs)


@dataclass
class Trace:
    """One forward."""

    calls: list[LayerCall]
    outside: Recording
    logits: Tensor
    answer: Any
    """All that the model returned."""

    @property
    def has_past(self) -> bool:
        """Whether the layers were given keys and values, or states, of tokens before these."""
        first = self.calls[0]
        return any(bool(t.any()) for t in all_tensors((*first.args, *first.kwargs.values()), only_cached=True))


@contextmanager
def _without_shortcuts() -> Iterator[None]:
    """Disable gradients and torch's fast path of multi-head attention, which calls no modules."""
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


def forward(model: nn.Module, ids: Tensor, arguments: Arguments | None = None) -> Tensor:
    """The logits of a plain forward."""
    with _without_shortcuts():
        return logits_of(_call(model, ids, arguments), model)


def _call(model: nn.Module, ids: Tensor, arguments: Arguments | None) -> Any:
    """The model's answer; a cache among the arguments stays as it is."""
    try:
        return call_with_tokens(model, ids, copied(dict(arguments), torch.clone) if arguments else arguments)
    except (torch.OutOfMemoryError, MemoryError, ShaketableError):
        raise
    except Exception as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"a plain forward of {type(model).__name__} fails on these tokens: {line}") from error


def trace(model: nn.Module, ids: Tensor, reference: Reference, arguments: Arguments | None = None) -> Trace:
    """Run the model once and keep what each layer was given and returned."""
    layers, paths = reference.layers, reference.paths
    places = {id(layer): i for i, layer in enumerate(layers)}
    recorder = Recorder(model, lambda path, module: id(module) in places or reference.leaf(path) is not None)
    with recorder.watching() as recording, _without_shortcuts():
        answer = _call(model, ids, arguments)
        logits = logits_of(answer, model)
    calls: dict[int, LayerCall] = {}
    for record in recording.records:
        module = model.get_submodule(record.path)
        if record.func is None and id(module) in places:
            index = places[id(module)]
            if index in calls:
                raise ModelError(f"{record.path} is called more than once in a forward; locate follows one call per layer")
            given = (record.args, record.kwargs, record.output, record.overwrites, record.autocast)
            calls[index] = LayerCall(index, record.path, module, *given)
    if len(calls) != len(layers):
        missing = next(i for i in range(len(layers)) if i not in calls)
        is_scripted = isinstance(layers[missing], torch.jit.ScriptModule)
        why = "is scripted: its calls cannot be seen" if is_scripted else "was not called in a forward"
        raise ModelError(f"{paths[missing]} {why}")
    return Trace([calls[i] for i in range(len(layers))], recording, logits, answer)


def record_layer(call: LayerCall, reference: Reference, x: Tensor | None = None) -> Recording:
    """Call a layer again and record every operator."""
    recorder = Recorder(call.module, lambda path, module: reference.leaf(f"{call.name}.{path}") is not None)
    with recorder.watching() as recording:
        call.again(x)
    return recording

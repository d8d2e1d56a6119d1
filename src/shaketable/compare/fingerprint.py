"""A fingerprint: the results of one device for one model, in one safetensors file with which another device is compared.

Stored are the inputs and outputs of every decoder layer and of every operator that is a module, so that the other device can be
*teacher-forced*: each operator gets the input that it had here.

    ids
    layer.{i}.input    layer.{i}.output
    layer.{i}.op.{path}.input    layer.{i}.op.{path}.output        second call of a module: {path}#2
    outside.op.{path}.input      outside.op.{path}.output          embeddings, the last norm, the head

An activation inside of stacked experts is left out: its rows are in the order in which the device sorts them. The head is
called once more on the last 8 tokens alone, and that call is stored. What else a layer is given (position embeddings, masks)
is made again where the file is replayed.

The metadata is one JSON text with the names of tensors that are stored once under several; a sha256 over it and every tensor is
stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from shaketable.capture.recorder import Record, Recording
from shaketable.capture.reference import Reference, check_model, describe
from shaketable.capture.trace import (
    Arguments,
    LayerCall,
    Trace,
    as_deployed,
    one_sequence,
    record_layer,
    token_batch,
    trace,
    unwrapped,
)
from shaketable.errors import ShaketableError
from shaketable.io.replacing import replacing
from shaketable.records.weight_hash import digest
from shaketable.sites.nested_tensors import tensors_of

HEAD_TOKENS = 8
"""Tokens kept of a Linear outside of the layers."""

Progress = Callable[[int, int, str], None]


class FingerprintError(ShaketableError, ValueError):
    """The file is not a fingerprint, is damaged, or is that of another model."""


class Metadata(BaseModel):
    """Everything about a fingerprint but its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    format: Literal["shaketable-fingerprint"] = "shaketable-fingerprint"
    schema_number: Literal[1] = Field(default=1, alias="schema")
    model: str
    """The name it was loaded by."""
    model_class: str
    num_layers: int
    hidden_size: int
    config_sha256: str
    weights_sha256: str
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    device: str
    attention: str
    tokens: int
    prompts: list[str] | None
    """None for the built-in text."""
    versions: dict[str, str]
    date: str
    switches: dict[str, str | bool]
    """Settings of torch for float32 products: TF32 and its like."""
    product_input: float
    """Relative rounding of the factors of float32 products that these switches allow."""
    layers: list[list[str]]
    """The operators of every layer, in the order of their calls."""
    before: list[str]
    """Operators ahead of the layers."""
    after: list[str]
    aliases: dict[str, str]
    unsteady: list[str] = []
    """In older files: arguments of layers that depend on hidden states. Not read."""


@dataclass
class Fingerprint:
    """Metadata and tensors, on the host."""

    about: Metadata
    tensors: dict[str, Tensor] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """A tensor by any of its names."""
        return self.tensors[self.about.aliases.get(name, name)]

    def op(self, layer: int | None, label: str) -> tuple[Tensor, Tensor]:
        """Input and output of an operator."""
        place = op_name(layer, label)
        return self.tensor(f"{place}.input"), self.tensor(f"{place}.output")

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def save(self, path: Path | str) -> None:
        """Write all of it as one safetensors file, or nothing: written beside its place, then moved there."""
        from safetensors.torch import save

        path, about = Path(path), self.about.model_dump_json(by_alias=True)
        contents = save(self.tensors, metadata={"shaketable": about, "sha256": digest(about, self.tensors)})
        try:
            with replacing(path.resolve()) as draft:
                draft.write_bytes(contents)
        except OSError as error:
            raise FingerprintError(f"cannot write {path}: {error.strerror or error}") from None


def op_name(layer: int | None, label: str) -> str:
    """Name of an operator in the file."""
    return f"outside.op.{label}" if layer is None else f"layer.{layer}.op.{label}"


# ---- making


def fingerprint(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    prompts: list[str] | None = None,
    input_ids: Tensor | None = None,
    tokens: int = 64,
    name: str = "",
    arguments: Arguments | None = None,
    layers: str | None = None,
    progress: Progress | None = None,
) -> Fingerprint:
    """Record a device's results for a model, so that another device can be compared with it.

    Args:
        model: The model, on the device whose fingerprint is taken.
        tokenizer: Its tokenizer; not needed with `input_ids`.
        prompts: Texts to run, or the texts behind `input_ids`, for the record; a built-in text by default.
        input_ids: Token ids of shape (1, n); made from the prompts by default.
        tokens: How many tokens to run.
        name: Name of the model in the file; its class by default.
        arguments: What `forward` needs besides tokens, by name.
        layers: Path of the module that holds the decoder layers, where they are not found by themselves.
        progress: Called with (layers done, layers in all, what is done).
    """
    model = unwrapped(model)
    ids = one_sequence(token_batch(tokenizer, prompts, tokens) if input_ids is None else input_ids)
    check_model(model, layers)
    device = next(model.parameters()).device
    with torch.no_grad(), as_deployed(model):
        reference = Reference(model, layers=layers)
        traced = trace(model, ids.to(device), reference, arguments)
        store = _Tensors()
        store.put("ids", ids)
        for call in traced.calls:
            store.put(f"layer.{call.index}.input", call.x)
            store.put(f"layer.{call.index}.output", call.y)
        stored = [_store_layer(store, call, reference, len(traced.calls), progress) for call in traced.calls]
        before, after = _store_outside(store, traced, model, reference)
        facts = describe(model, layers)
    facts |= {"model": name or type(model).__name__, "tokens": ids.shape[-1], "prompts": prompts}
    facts |= {"layers": stored, "before": before, "after": after, "aliases": store.aliases}
    return Fingerprint(Metadata.model_validate(facts), store.tensors)


class _Tensors:
    """Host copies by name; a tensor object that was stored before becomes an alias."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._seen: dict[int, tuple[Tensor, str]] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        if id(tensor) in self._seen:
            self.aliases[name] = self._seen[id(tensor)][1]
            return
        self._seen[id(tensor)] = (tensor, name)
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()

    def release(self) -> None:
        """Let go of a layer's tensors on the device; those of `layer.{i}.input` and `.output` stay known."""
        self._seen = {key: kept for key, kept in self._seen.items() if ".op." not in kept[1]}


def _store_layer(store: _Tensors, call: LayerCall, reference: Reference, total: int, progress: Progress | None) -> list[str]:
    if progress is not None:
        progress(call.index, total, f"layer {call.index}")
    recording = record_layer(call, reference)
    labels = []
    for label, record in labelled(recording):
        if is_routed(call.module, record.path):
            continue
        store.put(f"{op_name(call.index, label)}.input", first_tensor(record))
        store.put(f"{op_name(call.index, label)}.output", next(tensors_of(record.output)))
        labels.append(label)
    store.release()
    return labels


def is_routed(layer: nn.Module, path: str) -> bool:
    """Whether a module is inside stacked experts: the order of their rows is the device's own, and cannot be forced."""
    above = [path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)]
    return any(p.dim() == 3 for name in above for p in layer.get_submodule(name).parameters(recurse=False))


def labelled(recording: Recording) -> Iterator[tuple[str, Record]]:
    """The leaf operators of a call with their labels: the path, and #2, #3 … for further calls of the same module."""
    counts: dict[str, int] = {}
    for record in recording.records:
        if record.func is None:
            counts[record.path] = counts.get(record.path, 0) + 1
            n = counts[record.path]
            yield (record.path if n == 1 else f"{record.path}#{n}"), record


def first_tensor(record: Record) -> Tensor:
    """The first tensor that an operator read."""
    return next(tensors_of((record.args, record.kwargs)))


def _store_outside(store: _Tensors, traced: Trace, model: nn.Module, reference: Reference) -> tuple[list[str], list[str]]:
    inner = {call.name for call in traced.calls}
    before: list[str] = []
    after: list[str] = []
    chosen = before
    for label, record in labelled(traced.outside):
        if record.path in inner:
            chosen = after
            continue
        x, y = first_tensor(record), next(tensors_of(record.output))
        leaf = reference.leaf(record.path)
        if leaf is not None and leaf.kind in ("linear", "conv1d"):
            x = x[..., -HEAD_TOKENS:, :].contiguous()
            y = model.get_submodule(record.path)(x)
        store.put(f"{op_name(None, label)}.input", x)
        store.put(f"{op_name(None, label)}.output", y)
        chosen.append(label)
    return before, after


# ---- reading


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint and check every byte of it.

    Raises:
        FingerprintError: The file is missing, no safetensors, another program's, of another schema, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FingerprintError(f"{path} does not exist or is not a file; make one with: shaketable fingerprint MODEL -o {path}")
    try:
        with safe_open(path, framework="pt") as file:
            # A copy, because kernels may round otherwise on memory that is not aligned.
            head, tensors = file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FingerprintError(f"{path} is truncated, damaged or not a safetensors file: {error}") from None
    if "shaketable" not in head:
        raise FingerprintError(f"{path} is a safetensors file, but not one of shaketable fingerprint")
    try:
        about = Metadata.model_validate_json(head["shaketable"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "its metadata"
        raise FingerprintError(f"{path} is damaged, or of another version: {where}: {first['msg']}") from None
    if digest(head["shaketable"], tensors) != head.get("sha256"):
        raise FingerprintError(f"{path} is damaged: its contents do not have the sha256 that is written in it")
    return Fingerprint(about, tensors)


# ---- the same model


def check_same_model(about: Metadata, model: nn.Module, layers: str | None = None) -> None:
    """Refuse, in one line, a model that is not the one of the fingerprint."""
    check_model(model, layers)
    here = describe(model, layers)
    for key, what in (("model_class", "class"), ("num_layers", "number of layers"), ("dtype", "dtype")):
        if getattr(about, key) != here[key]:
            raise FingerprintError(f"the fingerprint is of another model: its {what} is {getattr(about, key)}, not {here[key]}")
    if about.config_sha256 != here["config_sha256"]:
        raise FingerprintError(f"the fingerprint is of another model: the config of {about.model} was not the same")
    if about.weights_sha256 != here["weights_sha256"]:
        raise FingerprintError(f"the fingerprint is of another model: the weights of {about.model} were not the same")

"""The operators of a Hugging Face decoder while it runs, to record or to change them.

Operators that are modules are watched (`recorder.watched`): the effect of other hooks belongs to the operator. Operators
between modules are read off the modules around them: attention is the input of o_proj, the activation that of down_proj, a
sum of the residual stream that of the next norm. The rotation is a function of the model's file and is replaced there for the
time of the call. `recorder.Recorder` records torch functions instead, which an engine with fused kernels does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import watched
from shaketable.errors import UnavailableError
from shaketable.numerics.decoder_operators import ROUTERS, OperatorCall
from shaketable.sites.structure import find_layers

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Visit = Callable[[OperatorCall, int], Tensor | None]
"""Called with an operator's call for one row of the batch, and the row; a result replaces the operator's, in a batch of one."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Numbers of a config that a model multiplies by between its operators (Granite); such models are not judged."""


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder of Llama's shape: Llama, Mistral, Qwen 2 and 3, SmolLM, and others with their names."""

    model: Any
    layers: list[nn.Module]
    paths: list[str]
    embedding: str
    norm: str
    rotary: str
    head: str

    @classmethod
    def of(cls, model: Any) -> DecoderParts:
        """The parts of a model; an error in one line where it has another shape."""
        if any(getattr(model.config, name, None) is not None for name in MULTIPLIERS):
            raise UnavailableError(f"the operators of {type(model).__name__} are not known: its config has multipliers")
        layers, paths = find_layers(model)
        for layer in layers:
            lacks = [n for n in (*NORMS, "mlp") if n not in layer._modules]
            lacks += [n for n in ATTENTION if not hasattr(layer._modules.get("self_attn"), n)]
            block = layer._modules.get("mlp")
            lacks += [] if any(hasattr(block, n) for n in ROUTERS) else [n for n in MLP if not hasattr(block, n)]
            if lacks or len([n for n in layer._modules if "norm" in n]) != len(NORMS):
                what = f"has no {lacks[0]}" if lacks else "has other norms"
                raise UnavailableError(
                    f"the operators of {type(model).__name__} are not known: its layer {what}, unlike Llama's"
                )
        names = {id(module): name for name, module in model.named_modules()}
        outside = {n: m for n, m in model.named_modules() if not any(n.startswith(f"{p}.") for p in paths)}
        norm = [n for n, m in outside.items() if "rmsnorm" in type(m).__name__.lower()]
        rotary = [n for n, m in outside.items() if "rotary" in type(m).__name__.lower()]
        if not layers or len(norm) != 1 or len(rotary) != 1:
            raise UnavailableError(f"the operators of {type(model).__name__} are not known: it is not of Llama's shape")
        ends = [names[id(m)] for m in (model.get_input_embeddings(), model.get_output_embeddings())]
        return cls(model, layers, paths, ends[0], norm[0], rotary[0], ends[1])


@dataclass(frozen=True)
class RowSpan:
    """The part of one row of a batch that is not padding."""

    padding: int = 0
    """Columns in front of the sequence."""
    start: int = 0
    """Position of the first token behind them."""


@contextmanager
def observed(decoder: DecoderParts, visit: Visit, spans: Sequence[RowSpan | None] = (RowSpan(),)) -> Iterator[DecoderObserver]:
    """Calls of the model with every operator shown to `visit`; a span for each row of the batch, None to pass it over."""
    observer = DecoderObserver(decoder, visit, spans)
    modules = {path: decoder.model.get_submodule(path) for path in {*observer.modules, *observer.before, *observer.after}}
    with torch.no_grad(), watched(modules, observer.leave, observer.enter), observer.rotations():
        yield observer


class DecoderObserver:
    """The operators of one model; `made` has the last result of every one by its name."""

    def __init__(self, decoder: DecoderParts, visit: Visit, spans: Sequence[RowSpan | None]) -> None:
        self.decoder, self.visit, self.spans = decoder, visit, spans
        self.made: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        """Inputs of the modules that are operators."""
        self.rotating: tuple[int, str] | None = None
        """Layer and path of the attention that runs."""
        self.modules: dict[str, tuple[str, int | None]] = {}
        """Kind and layer of every module that is one operator."""
        self.before: dict[str, Callable[[Tensor], Tensor | None]] = {}
        """What to do with a module's input: there the result of an operator between modules arrives."""
        self.after: dict[str, Callable[[Tensor], Tensor | None]] = {}
        """What to do with a module's output."""
        d = decoder
        self.modules[d.embedding] = ("embedding", None)
        for index, (layer, path) in enumerate(zip(d.layers, d.paths, strict=True)):
            self._layer(index, layer, path)
        self.modules[d.norm] = ("rms_norm", None)
        self.modules[d.head] = ("lm_head", None)

    def restart(self, spans: Sequence[RowSpan | None]) -> None:
        """Begin another forward."""
        self.spans = spans
        self.made.clear()

    # ---- one layer

    def _layer(self, index: int, layer: nn.Module, path: str) -> None:
        attention, own = f"{path}.self_attn", layer._modules["self_attn"]
        assert own is not None
        self.before[path] = lambda x: self.made.update({f"{path}.in": x})
        self.modules[f"{path}.input_layernorm"] = ("rms_norm", index)
        self.before[attention] = lambda x: setattr(self, "rotating", (index, attention))
        self.after[attention] = lambda x: setattr(self, "rotating", None)
        names = [f"{attention}.{name}" for name in ("q_norm", "k_norm", *ATTENTION) if name in own._modules]
        self.modules |= {name: ("rms_norm" if name.endswith("norm") else "linear", index) for name in names}
        self.before[f"{attention}.o_proj"] = lambda x: self._attention(index, attention, x)
        self.modules[f"{path}.post_attention_layernorm"] = ("rms_norm", index)
        self.before[f"{path}.post_attention_layernorm"] = lambda x: self._middle(index, path, x)
        self._mlp(index, layer, f"{path}.mlp")
        ends = {"x": f"{path}.mlp", "residual": f"{path}.middle"}
        self.after[path] = lambda x: self._between(f"{path}.mlp_residual", "residual", index, x, **ends)

    def _mlp(self, index: int, layer: nn.Module, path: str) -> None:
        block = layer._modules["mlp"]
        assert block is not None
        if not all(name in block._modules for name in MLP):
            name = next(n for n in ROUTERS if hasattr(block, n))
            if block.get_submodule(name)._parameters.get("weight") is not None:
                self.modules[f"{path}.{name}"] = ("router", index)
            self.modules[path] = ("experts", index)
            return
        self.after[path] = lambda x: self.made.update({path: x})
        self.modules |= {f"{path}.{name}": ("linear", index) for name in MLP}
        inputs = {"x": f"{path}.gate_proj", "up": f"{path}.up_proj"}
        self.before[f"{path}.down_proj"] = lambda x: self._between(f"{path}.act_fn", "activation", index, x, **inputs)

    def _attention(self, index: int, path: str, output: Tensor) -> Tensor | None:
        names = {"q": f"{path}.rotary_q", "k": f"{path}.rotary_k", "v": f"{path}.v_proj"}
        if all(name in self.made for name in names.values()):
            v, k = self.made[names["v"]], self.made[names["k"]]
            self.made[f"{path}.v"] = v.view(*v.shape[:-1], -1, k.shape[-1])
        return self._between(path, "attention", index, output, **names | {"v": f"{path}.v"})

    def _middle(self, index: int, path: str, output: Tensor) -> None:
        """The residual stream after attention; a change of it is added before it, by o_proj."""
        self.made[f"{path}.middle"] = output
        name = f"{path}.attention_residual"
        self._between(name, "residual", index, output, x=f"{path}.self_attn.o_proj", residual=f"{path}.in")

    @contextmanager
    def rotations(self) -> Iterator[None]:
        """The rotation of every file of the model's layers, replaced by one that is seen."""
        replaced = []
        try:
            for home in {sys.modules[type(layer.self_attn).__module__] for layer in self.decoder.layers}:
                rotate = vars(home).get("apply_rotary_pos_emb")
                if rotate is None:
                    raise UnavailableError(f"{home.__name__} has no apply_rotary_pos_emb: its rotation cannot be seen")
                replaced.append((home, rotate))
                home.apply_rotary_pos_emb = self._rotation(rotate)  # type: ignore[attr-defined]
            yield
        finally:
            for home, rotate in replaced:
                home.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]

    def _rotation(self, rotate: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            ends: list[Tensor] = list(rotate(q, k, *args, **kwargs))
            if self.rotating is None:
                return ends[0], ends[1]
            index, path = self.rotating
            for i, (name, x) in enumerate((("rotary_q", q), ("rotary_k", k))):
                inputs = {"x": x.transpose(1, 2)}
                changed = self._show(f"{path}.{name}", "rotary", index, inputs, ends[i].transpose(1, 2))
                ends[i] = ends[i] if changed is None else changed.transpose(1, 2)
                self.made[f"{path}.{name}"] = ends[i].transpose(1, 2)
            return ends[0], ends[1]

        return rotated

    # ---- what modules are given and make

    def enter(self, path: str, x: Tensor) -> Tensor | None:
        """Before a module: its input, as it is and as an operator between modules made it."""
        self.given[path] = x
        return self.before[path](x) if path in self.before else None

    def leave(self, path: str, x: Tensor, output: Tensor) -> Tensor | None:
        """After a module: an operator of its own, or the end of others."""
        changed = None
        if path in self.modules:
            kind, layer = self.modules[path]
            changed = self._show(path, kind, layer, {"ids" if kind == "embedding" else "x": self.given[path]}, output)
            self.made[path] = output if changed is None else changed
            changed = None if kind == "router" else changed  # its choice would not be that of other logits
        return self.after[path](output) if path in self.after else changed

    def _between(self, name: str, kind: str, layer: int | None, output: Tensor, **sources: str) -> Tensor | None:
        """An operator between modules, whose inputs are results of others; a layer that is skipped has none."""
        if not all(source in self.made for source in sources.values()):
            return None
        return self._show(name, kind, layer, {key: self.made[source] for key, source in sources.items()}, output)

    def _show(self, name: str, kind: str, layer: int | None, inputs: dict[str, Tensor], output: Tensor) -> Tensor | None:
        changed = None
        for row, span in enumerate(self.spans):
            if span is None:
                continue
            read = {key: self._row(t, row, span) for key, t in inputs.items()}
            made = self._row(output, row, span)
            if kind in ("rotary", "attention"):
                read["positions"] = torch.arange(span.start, span.start + len(made))
            changed = self.visit(OperatorCall(name, kind, layer, read, made), row)
        if changed is None:
            return None
        # nothing reads logits in the model's dtype, and rounding would hide a difference in float32
        dtype = changed.dtype if kind == "lm_head" else output.dtype
        return changed.reshape(output.shape).to(output.device, dtype)

    def _row(self, x: Tensor, row: int, span: RowSpan) -> Tensor:
        """One row of the batch; a router has flattened it."""
        flattened = x.dim() == 2 and x.is_floating_point()
        return (x.reshape(len(self.spans), -1, x.shape[-1]) if flattened else x)[row, span.padding :]


@dataclass(frozen=True)
class RecordedRow:
    """The calls of one sequence of a batch."""

    calls: list[OperatorCall]
    prompt: list[OperatorCall] | None
    """In `decode`, the calls of reading the prompt, which went before."""
    logits: Tensor
    """The model's own, before each token of the completion."""
    head: Tensor
    """The result of the head for the same tokens: another one where the model changes logits behind it."""


def padded(rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "left", extra: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and mask of rows of different lengths."""
    width = max(len(row) for row in rows) + extra
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


def masked(mask: Tensor, last: int | None = None) -> dict[str, Tensor]:
    """Mask and positions of the last so many columns; none where nothing is padded, as trainers call their models then."""
    if bool(mask.all()):
        return {}
    places = (mask.cumsum(1) - 1).clamp_min(0)
    return {"attention_mask": mask, "position_ids": places if last is None else places[:, -last:]}


@torch.no_grad()
def record_batch(
    model: Any, sequences: Sequence[tuple[list[int], list[int]]], phase: Phase, rows: Sequence[int] | None = None
) -> list[RecordedRow]:
    """The calls of every operator on these sequences, read together: padded on the left, as a sampler batches them.

    In `decode`, prompts are read first and completions token by token. Sequences that are not among `rows` are read with the
    others, and not recorded.
    """
    kept = range(len(sequences)) if rows is None else rows
    prefill = phase == "prefill" or not any(completion for _, completion in sequences)
    front = [[*prompt, *completion] if prefill else prompt for prompt, completion in sequences]
    device = model.get_input_embeddings().weight.device
    ids, mask = (x.to(device) for x in padded(front))
    width = ids.shape[1]
    spans = {row: RowSpan(width - len(front[row])) for row in kept}
    calls: dict[int, list[OperatorCall]] = {}
    cache: Any = None

    def run(ids: Tensor, spans: Mapping[int, RowSpan]) -> dict[int, Tensor]:
        """One forward with the cache: logits of some rows, on the CPU, without the padding; `calls` has their operators."""
        nonlocal cache
        calls.clear()
        calls.update({row: [] for row in spans})
        observer.restart([spans.get(i) for i in range(len(ids))])
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, **masked(mask, ids.shape[1]))
        cache = out.past_key_values
        return {row: out.logits[row, span.padding :].detach().cpu() for row, span in spans.items()}

    with observed(DecoderParts.of(model), lambda call, row: calls[row].append(call.copied())) as observer:
        logits = run(ids, spans)
        if prefill:
            ends = {i: slice(len(sequences[i][0]) - 1, -1) for i in kept}
            return [RecordedRow(calls[i], None, logits[i][ends[i]], calls[i][-1].output[ends[i]]) for i in kept]
        passes = {row: [calls[row]] for row in kept}
        made = {row: [logits[row][-1:]] for row in kept}
        for step in range(max(len(completion) for _, completion in sequences)):
            tokens = [one[step] if step < len(one) else 0 for _, one in sequences]
            mask = torch.cat([mask, mask.new_ones(len(sequences), 1)], 1)
            spans = {i: RowSpan(0, len(sequences[i][0]) + step) for i in kept if step < len(sequences[i][1])}
            for row, one in run(torch.tensor(tokens, device=device).unsqueeze(1), spans).items():
                passes[row].append(calls[row])
                made[row].append(one)
    found = []
    for row, each in passes.items():
        joined, prompt = _joined(each), each[0]
        head = torch.cat([prompt[-1].output[-1:], joined[-1].output[:-1]])
        found.append(RecordedRow(joined, prompt, torch.cat(made[row][:-1]), head))
    return found


def _joined(passes: list[list[OperatorCall]]) -> list[OperatorCall]:
    """Calls of single tokens put together; keys and values are those of the prompt too."""
    joined = []
    by_name = [{call.name: call for call in calls} for calls in passes]
    for first in passes[0]:
        if not all(first.name in calls for calls in by_name):  # it ran in some passes only
            continue
        calls = [one[first.name] for one in by_name]
        later = calls[1:]
        inputs = {key: torch.cat([c.inputs[key] for c in (calls if key in ("k", "v") else later)]) for key in first.inputs}
        joined.append(OperatorCall(first.name, first.kind, first.layer, inputs, torch.cat([c.output for c in later])))
    return joined

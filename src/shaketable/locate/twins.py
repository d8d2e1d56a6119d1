"""Twins: ask the device for the same function with other numbers.

A *space* is a vector of channels that a layer passes on: the residual stream, a norm's output, the queries, the values, the
hidden channels of the MLP. A *map* is a matrix between two spaces. A *circuit* says which map reads and writes which space. A
*gauge* gives every space another basis, in which the layer computes the same function; docs/locate.md has the table.

Signs and powers of two are exact in IEEE arithmetic, so a healthy device must return the same bits, and the tolerance is zero.
Powers of two are used only where every value of the call and of its twin stays normal, which is checked. Weights are swapped
inside of the module on the device: a copy would have its own memory, and may be given other kernels.

Only architectures in `WIRINGS` have a circuit; anything else gets a reason instead. The modules of the layer must be exactly
those that the wiring explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import Recording, channels, differing, main_result, same
from shaketable.numerics.operators import leaf_of
from shaketable.sites.nested_tensors import map_tensors, tensors_of

WIRINGS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"), "llama"),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), "gemma"),
    "gpt2": "gpt2",
}
LARGEST_EXPONENT = 3


# ---- circuits


@dataclass(frozen=True)
class Map:
    """A matrix that reads one space and writes one or more, side by side."""

    parameter: str
    """Path of the weight inside of the layer."""
    reads: str
    writes: tuple[str, ...]
    bias: str | None = None
    layout: str = "out,in"
    """`out,in` (Linear), `in,out` (Conv1D) or `expert,out,in`."""

    @property
    def module(self) -> str:
        """Path of the module."""
        return self.parameter.rsplit(".", 1)[0]


@dataclass(frozen=True)
class Norm:
    """A norm that reads one space and writes another of the same size."""

    module: str
    reads: str
    writes: str
    kind: str
    """`rmsnorm`, `rmsnorm_late`, `rmsnorm_one` (times 1 + weight) or `layernorm`."""
    eps: str = "variance_epsilon"


@dataclass(frozen=True)
class Circuit:
    """The wiring of one layer."""

    sizes: dict[str, int]
    maps: tuple[Map, ...]
    norms: tuple[Norm, ...]
    head: int
    """Channels of a head."""
    groups: int
    """Query heads per key/value head."""
    rotary: int
    """Channels of a head that are rotated in pairs (i, i + rotary/2)."""
    head_norms: tuple[str, ...] = ()
    """Norms of the queries and keys, one weight for all heads."""
    routed: bool = False
    causal: bool = False
    """Whether a token sees none of those behind it."""

    def inputs(self) -> dict[str, str]:
        """The space each module reads."""
        return {m.module: m.reads for m in self.maps} | {n.module: n.reads for n in self.norms}

    def outputs(self) -> dict[str, tuple[str, ...]]:
        """The spaces each module writes, side by side; stacked experts are left out, as they are not called one by one."""
        maps = {m.module: m.writes for m in self.maps if m.layout != "expert,out,in"}
        return maps | {n.module: (n.writes,) for n in self.norms}


class _UnwiredError(Exception):
    """The layer is not what the wiring says."""


def circuit_of(layer: nn.Module, config: Any) -> Circuit | str:
    """The wiring of a reference's layer, or the reason why there is none."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    kind = getattr(text, "model_type", None)
    wiring = WIRINGS.get(kind or "")
    if wiring is None:
        return f"no symmetries are known for the architecture {kind or type(layer).__name__}"
    try:
        return _Wiring(layer, text).circuit(wiring)
    except (AttributeError, _UnwiredError) as error:
        return f"this {kind} layer is not wired as expected: {error}"


class _Wiring:
    """Collects the maps and norms of one layer."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.layer, self.config = layer, config
        self.sizes: dict[str, int] = {}
        self.maps: list[Map] = []
        self.norms: list[Norm] = []

    def circuit(self, wiring: str) -> Circuit:
        config, is_gpt2 = self.config, wiring == "gpt2"
        heads = config.num_attention_heads
        pairs, head, rotary, routed = heads, config.hidden_size // heads, 0, False
        if not is_gpt2:
            pairs, head = config.num_key_value_heads, getattr(config, "head_dim", None) or head
            rotary = int(head * (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0))
        self.sizes.update(stream=config.hidden_size, q=heads * head, k=pairs * head, v=pairs * head, mixed=heads * head)
        if is_gpt2:
            self._gpt2()
        else:
            self._attention(post="attended" if wiring == "gemma" else "stream")
            routed = self._feed_forward(post="fed" if wiring == "gemma" else "stream")
            self._norms(wiring)
        self._check_explained()
        attention = self.layer.get_submodule("attn" if is_gpt2 else "self_attn")
        head_norms = tuple(n for n in ("q_norm", "k_norm") if n in attention._modules)
        causal = getattr(attention, "is_causal", False) is True
        parts = (self.sizes, tuple(self.maps), tuple(self.norms))
        return Circuit(*parts, head, heads // pairs, rotary, head_norms, routed, causal)

    def _map(self, path: str, reads: str, *writes: str, parameter: str = "weight", layout: str = "out,in") -> None:
        bias = f"{path}.bias" if self.layer.get_submodule(path)._parameters.get("bias") is not None else None
        self.maps.append(Map(f"{path}.{parameter}", reads, writes, bias, layout))

    def _norm(self, path: str, reads: str, writes: str) -> None:
        module = self.layer.get_submodule(path)
        leaf = leaf_of(module)
        if leaf is None or "norm" not in leaf.kind:
            raise _UnwiredError(f"{path} is a {type(module).__name__}, a norm without a definition")
        eps = "variance_epsilon" if "variance_epsilon" in vars(module) else "eps"
        self.norms.append(Norm(path, reads, writes, leaf.kind, eps))
        self.sizes[reads] = self.sizes[writes] = self.sizes["stream"]

    def _attention(self, post: str) -> None:
        if "qkv_proj" in self.layer.get_submodule("self_attn")._modules:
            self._map("self_attn.qkv_proj", "n1", "q", "k", "v")
        else:
            for name in "qkv":
                self._map(f"self_attn.{name}_proj", "n1", name)
        self._map("self_attn.o_proj", "mixed", post)

    def _feed_forward(self, post: str) -> bool:
        """Maps of the MLP, or of its experts; whether there are experts."""
        parts = dict(self.layer.get_submodule("mlp").named_children())
        if "experts" not in parts:
            self._gated("mlp", "", post, parts)
            return False
        self._map("mlp.gate", "n2", "choice")
        self._map("mlp.experts", "n2", "gate", "up", parameter="gate_up_proj", layout="expert,out,in")
        self._map("mlp.experts", "hidden", post, parameter="down_proj", layout="expert,out,in")
        experts: Any = parts["experts"]
        self.sizes["choice"] = experts.num_experts
        self.sizes.update(dict.fromkeys(("gate", "up", "hidden"), experts.down_proj.shape[-1]))
        if "shared_expert" in parts:
            self._gated("mlp.shared_expert", "shared ", post, dict(parts["shared_expert"].named_children()))
            self._map("mlp.shared_expert_gate", "n2", "shared choice")
            self.sizes["shared choice"] = 1
        return True

    def _gated(self, path: str, prefix: str, post: str, parts: dict[str, Any]) -> None:
        if "gate_up_proj" in parts:
            self._map(f"{path}.gate_up_proj", "n2", f"{prefix}gate", f"{prefix}up")
        else:
            self._map(f"{path}.gate_proj", "n2", f"{prefix}gate")
            self._map(f"{path}.up_proj", "n2", f"{prefix}up")
        self._map(f"{path}.down_proj", f"{prefix}hidden", post)
        self.sizes.update({f"{prefix}{name}": parts["down_proj"].in_features for name in ("gate", "up", "hidden")})

    def _norms(self, wiring: str) -> None:
        self._norm("input_layernorm", "stream", "n1")
        if wiring == "gemma":
            self._norm("post_attention_layernorm", "attended", "stream")
            self._norm("pre_feedforward_layernorm", "stream", "n2")
            self._norm("post_feedforward_layernorm", "fed", "stream")
        else:
            self._norm("post_attention_layernorm", "stream", "n2")

    def _gpt2(self) -> None:
        self._norm("ln_1", "stream", "n1")
        self._norm("ln_2", "stream", "n2")
        self._map("attn.c_attn", "n1", "q", "k", "v", layout="in,out")
        self._map("attn.c_proj", "mixed", "stream", layout="in,out")
        self._map("mlp.c_fc", "n2", "gate", layout="in,out")
        self._map("mlp.c_proj", "hidden", "stream", layout="in,out")
        width = self.layer.get_submodule("mlp.c_fc").get_parameter("weight").shape[1]
        self.sizes.update(gate=width, hidden=width)

    def _check_explained(self) -> None:
        """Every parameter must belong to a map or a norm."""
        known = {m.module for m in self.maps} | {n.module for n in self.norms}
        for path, module in self.layer.named_modules():
            if path in known or path.rsplit(".", 1)[-1] in ("q_norm", "k_norm"):
                continue
            if own := [name for name, p in module._parameters.items() if p is not None]:
                raise _UnwiredError(f"{path}.{own[0]} is not explained")


# ---- gauges


@dataclass
class Gauge:
    """A new basis for every space: a factor per channel."""

    spaces: dict[str, Tensor]
    """Factor of each channel, as the twin has it over the original."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Factors of parameters that are not maps: norms, by their path in the layer."""
    attributes: dict[tuple[str, str], float] = field(default_factory=dict)
    """Factor of a module's number: eps."""


def draw_gauge(circuit: Circuit, seed: int, powers: bool) -> Gauge:
    """Random signs, and powers of two if asked, for every space that has that freedom; the rest follows from them."""
    generator = torch.Generator().manual_seed(seed)
    is_centred, size = any(n.kind == "layernorm" for n in circuit.norms), circuit.sizes["stream"]
    stream = -torch.ones(size) if is_centred else _factors(size, generator, powers=False)
    if powers and not any(n.writes == "stream" for n in circuit.norms):
        stream = stream * 2.0**LARGEST_EXPONENT
    spaces = {name: torch.ones(size) for name, size in circuit.sizes.items()}
    spaces.update({name: stream for name in ("stream", "attended", "fed") if name in spaces})
    free = [n.writes for n in circuit.norms if n.kind != "rmsnorm_one" and n.writes != "stream"]
    for space in (*free, "v", "up", "shared up"):
        if space in spaces:
            spaces[space] = _factors(circuit.sizes[space], generator, powers)
    keys, half = [], circuit.rotary // 2
    for _ in range(circuit.sizes["k"] // circuit.head):
        drawn = _factors(circuit.head, generator, powers and not circuit.head_norms)
        keys += [drawn[:half], drawn[:half], drawn[2 * half :]]  # both channels of a rotated pair alike
    spaces["k"] = torch.cat(keys)
    spaces["mixed"] = spaces["v"].view(-1, circuit.head).repeat_interleave(circuit.groups, 0).flatten()
    spaces["q"] = (1 / spaces["k"]).view(-1, circuit.head).repeat_interleave(circuit.groups, 0).flatten()
    for prefix in ("", "shared "):
        if f"{prefix}up" in spaces:
            spaces[f"{prefix}hidden"] = spaces[f"{prefix}up"]
    gauge, signs, scale = Gauge(spaces), stream.sign(), float(stream[0].abs())
    for norm in circuit.norms:
        if scale != 1:
            gauge.attributes[norm.module, norm.eps] = scale * scale
        if norm.kind == "rmsnorm_one":
            spaces[norm.writes] = signs
            continue
        gauge.weights[f"{norm.module}.weight"] = spaces[norm.writes] * signs
        if norm.kind == "layernorm":
            gauge.weights[f"{norm.module}.bias"] = spaces[norm.writes]
    return gauge


def _factors(n: int, generator: torch.Generator, powers: bool) -> Tensor:
    signs = torch.randint(0, 2, (n,), generator=generator).float() * 2 - 1
    if not powers:
        return signs
    return signs * torch.exp2(torch.randint(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1, (n,), generator=generator).float())


def _rescaled(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> dict[str, Tensor]:
    """The parameters that a gauge changes, by their paths in the layer, as it has them."""
    changed = {}
    for m in circuit.maps:
        weight = layer.get_parameter(m.parameter)
        written = torch.cat([gauge.spaces[s] for s in m.writes])
        rows, columns = written.to(weight), (1 / gauge.spaces[m.reads]).to(weight)
        if m.layout == "in,out":
            rows, columns = columns, rows
        changed[m.parameter] = (weight.detach() * rows[:, None]).mul_(columns)
        if m.bias is not None:
            changed[m.bias] = _times(layer.get_parameter(m.bias), written)
    for path, factor in gauge.weights.items():
        owner, _, name = path.rpartition(".")
        if layer.get_submodule(owner)._parameters.get(name) is not None:
            changed[path] = _times(layer.get_parameter(path), factor)
    return changed


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor.detach() * factor.to(tensor)


@contextmanager
def gauged(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> Iterator[None]:
    """The layer with the gauge's weights and numbers; the original is always restored."""
    changed = _rescaled(layer, circuit, gauge)
    owners = {path: (layer.get_submodule(path.rpartition(".")[0])._parameters, path.rpartition(".")[2]) for path in changed}
    before = {path: table[name] for path, (table, name) in owners.items()}
    numbers = {(path, name): getattr(layer.get_submodule(path), name) for path, name in gauge.attributes}
    try:
        for path, (table, name) in owners.items():
            table[name] = nn.Parameter(changed[path], requires_grad=False)
        for (path, name), factor in gauge.attributes.items():
            setattr(layer.get_submodule(path), name, numbers[path, name] * factor)
        yield
    finally:
        for path, (table, name) in owners.items():
            table[name] = before[path]
        for (path, name), number in numbers.items():
            setattr(layer.get_submodule(path), name, number)


# ---- comparing


@dataclass(frozen=True)
class TwinDifference:
    """The first place where a twin disagrees with the original."""

    path: str | None
    """The leaf; the module around when functions between leaves disagree; None for the layer's own additions."""
    share: float
    lanes: list[int]
    after: str | None = None
    """For the layer's own additions: the part of the layer that is added."""


def first_difference(circuit: Circuit, gauge: Gauge, original: Recording, twin: Recording) -> TwinDifference | None:
    """Compare leaf by leaf, in the order of computation. A leaf whose input differs already is not to blame: what lies
    between it and the leaves before it is."""
    reads, writes = circuit.inputs(), circuit.outputs()
    partners = {r.path: r for r in twin.records if r.func is None}
    last: str | None = None
    for record in original.records:
        other = partners.get(record.path)
        if record.func is not None or other is None or record.path not in writes:
            continue
        found = _compare(next(tensors_of(record.output)), next(tensors_of(other.output)), writes[record.path], gauge)
        if found is not None:
            given, theirs = (next(tensors_of((r.args, r.kwargs))) for r in (record, other))
            earlier = _compare(given, theirs, (reads[record.path],), gauge)
            if earlier is None:
                return TwinDifference(record.path, *found)
            between = record.path.rpartition(".")[0] or None  # the module that holds the leaf; the layer for its own norms
            return TwinDifference(between, *earlier, None if between else last)
        last = record.path.partition(".")[0]
    found = _compare(main_result(original.output), main_result(twin.output), ("stream",), gauge)
    return None if found is None else TwinDifference(None, *found, last)


def _compare(a: Tensor, b: Tensor, spaces: tuple[str, ...], gauge: Gauge) -> tuple[float, list[int]] | None:
    expected = a * torch.cat([gauge.spaces[s] for s in spaces]).to(a)
    if same(expected, b):
        return None
    differs = differing(expected, b)
    return float(differs.double().mean()), channels(differs)


def until(recording: Recording, token: int) -> Recording:
    """The leaves' inputs and outputs, cut to the tokens before one."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :token] if tensor.dim() == 3 else tensor

    leaves = [r for r in recording.records if r.func is None]
    records = [replace(r, args=map_tensors(r.args, cut), kwargs={}, output=map_tensors(r.output, cut)) for r in leaves]
    return Recording(records, [], map_tensors(recording.output, cut))


def stays_normal(recording: Recording) -> bool:
    """Whether every value that leaves take and give has room for a few powers of two on both sides."""
    leaves = [r for r in recording.records if r.func is None]
    tensors = {id(t): t for r in leaves for t in tensors_of((r.args, r.kwargs, r.output)) if t.is_floating_point()}
    for tensor in tensors.values():
        info, size = torch.finfo(tensor.dtype), tensor.detach().abs()
        size = size[size != 0]
        if size.numel() and not bool(size.min() >= info.tiny * 2.0**12 and size.max() <= info.max / 2.0**12):
            return False
    return True

"""Gauge twins: ask the device for the same function with other numbers.

Each space of a layer's circuit gets a new basis. Signs and powers of two are exact in IEEE arithmetic: every product,
sum, rounding and norm of the twin is the original's with a sign or an exponent changed, so a healthy device must return
the same bits, and the tolerance is zero.

Which bases there are is told by `gauge.py`. Powers of two are used only where every value of the call and of its twin stays
normal, which is checked.

How a decoder layer is wired: which space each matrix reads and writes. What twins need to know of an architecture.

A *space* is a vector of channels that a layer passes on: the residual stream, a norm's output, the queries, the values,
the hidden channels of the MLP. A *map* is a matrix between two spaces. With that, every symmetry of a layer is one
statement: change the basis of a space (by signs, powers of two, a permutation), change the rows of the maps that write
it and the columns of those that read it, and the layer computes the same function with other numbers.

Only architectures in `WIRINGS` have a circuit; anything else gets a reason instead. Nothing here is guessed from names
alone: the modules of the layer must be exactly those the wiring explains.

A gauge: another basis for every space of a layer, in which it computes the same function with other numbers.

    stream      x → S·2^k·x with signs S per channel: rows of what writes the stream, columns of what reads it; eps·4^k
    norm output weight × n, columns of the maps it feeds × 1/n
    values      rows of v × s, columns of o × 1/s, for every query head of the group
    up, down    rows of up × s, columns of down × 1/s; the gate has none: SiLU is neither odd nor homogeneous
    queries     rows of k × s, rows of q × 1/s, both channels of a rotated pair alike

A LayerNorm has a mean: the stream gets one sign for all channels. A norm that multiplies by 1 + weight cannot be scaled
exactly: its output takes the stream's signs. Queries and keys that pass a norm of their own have lost their size: signs only.

Locate draws gauges at random, and a healthy device must not notice (`twins.py`). Harden chooses one in which a faulty device
does less harm, and leaves it in the weights.

For a twin the weights are swapped inside of the module that is on the device, for the time of one call: a copy of the layer
would be another layer, with its own memory and its own kernels' luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import Recording, main_result, same
from shaketable.numerics.operators import leaf_of
from shaketable.sites.nested_tensors import map_tensors, tensors_of

WIRINGS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"), "llama"),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), "gemma"),
    "gpt2": "gpt2",
}


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
    others: tuple[str, ...] = ()
    """Leaves without weights: activations and dropouts."""

    def inputs(self) -> dict[str, str]:
        """The space each module reads."""
        return {m.module: m.reads for m in self.maps} | {n.module: n.reads for n in self.norms}

    def outputs(self) -> dict[str, tuple[str, ...]]:
        """The spaces each module writes, side by side; stacked experts are left out, as they are not called one by one."""
        maps = {m.module: m.writes for m in self.maps if m.layout != "expert,out,in"}
        return maps | {n.module: (n.writes,) for n in self.norms}


@dataclass
class _Builder:
    layer: nn.Module
    config: Any
    sizes: dict[str, int] = field(default_factory=dict)
    maps: list[Map] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)

    def map(self, path: str, reads: str, *writes: str, parameter: str = "weight", layout: str = "out,in") -> None:
        module = self.layer.get_submodule(path)
        bias = f"{path}.bias" if module._parameters.get("bias") is not None else None
        self.maps.append(Map(f"{path}.{parameter}", reads, writes, bias, layout))

    def norm(self, path: str, reads: str, writes: str) -> None:
        module = self.layer.get_submodule(path)
        leaf = leaf_of(module)
        if leaf is None or "norm" not in leaf.kind:
            raise _UnwiredError(f"{path} is a {type(module).__name__}, a norm without a definition")
        self.norms.append(
            Norm(path, reads, writes, leaf.kind, "variance_epsilon" if "variance_epsilon" in vars(module) else "eps")
        )
        self.sizes[reads] = self.sizes[writes] = self.sizes["stream"]


class _UnwiredError(Exception):
    """The layer is not what the wiring says."""


def circuit_of(layer: nn.Module, config: Any) -> Circuit | str:
    """The wiring of a reference's layer, or the reason why there is none."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    kind = getattr(text, "model_type", None)
    wiring = WIRINGS.get(kind or "")
    if wiring is None:
        return f"no gauge is known for the architecture {kind or type(layer).__name__}"
    builder = _Builder(layer, text)
    try:
        return _build(builder, wiring)
    except (AttributeError, _UnwiredError) as error:
        return f"this {kind} layer is not wired as expected: {error}"


def _build(b: _Builder, wiring: str) -> Circuit:
    heads = b.config.num_attention_heads
    pairs, head = heads, b.config.hidden_size // heads
    if wiring != "gpt2":
        pairs, head = b.config.num_key_value_heads, getattr(b.config, "head_dim", None) or head
    b.sizes.update(stream=b.config.hidden_size, q=heads * head, k=pairs * head, v=pairs * head, mixed=heads * head)
    routed = False
    if wiring == "gpt2":
        rotary = 0
        _gpt2(b)
    else:
        rope = getattr(b.config, "rope_parameters", None) or {}
        rotary = int(head * rope.get("partial_rotary_factor", 1.0))
        _attention(b, post="attended" if wiring == "gemma" else "stream")
        routed = _feed_forward(b, post="fed" if wiring == "gemma" else "stream")
        _norms(b, wiring)
    others = _check_explained(b)
    attention = b.layer.get_submodule("attn" if wiring == "gpt2" else "self_attn")
    head_norms = tuple(n for n in ("q_norm", "k_norm") if n in dict(attention.named_children()))
    causal = getattr(attention, "is_causal", False) is True
    return Circuit(b.sizes, tuple(b.maps), tuple(b.norms), head, heads // pairs, rotary, head_norms, routed, causal, others)


def _attention(b: _Builder, post: str) -> None:
    if "qkv_proj" in dict(b.layer.get_submodule("self_attn").named_children()):
        b.map("self_attn.qkv_proj", "n1", "q", "k", "v")
    else:
        for name in "qkv":
            b.map(f"self_attn.{name}_proj", "n1", name)
    b.map("self_attn.o_proj", "mixed", post)


def _feed_forward(b: _Builder, post: str) -> bool:
    mlp = b.layer.get_submodule("mlp")
    parts = dict(mlp.named_children())
    if "experts" not in parts:
        _gated(b, "mlp", "", post, parts)
        return False
    b.map("mlp.gate", "n2", "choice")
    b.map("mlp.experts", "n2", "gate", "up", parameter="gate_up_proj", layout="expert,out,in")
    b.map("mlp.experts", "hidden", post, parameter="down_proj", layout="expert,out,in")
    experts: Any = parts["experts"]
    b.sizes["choice"] = experts.num_experts
    b.sizes.update(dict.fromkeys(("gate", "up", "hidden"), experts.down_proj.shape[-1]))
    if "shared_expert" in parts:
        _gated(b, "mlp.shared_expert", "shared ", post, dict(parts["shared_expert"].named_children()))
        b.map("mlp.shared_expert_gate", "n2", "shared choice")
        b.sizes["shared choice"] = 1
    return True


def _gated(b: _Builder, path: str, prefix: str, post: str, parts: dict[str, Any]) -> None:
    if "gate_up_proj" in parts:
        b.map(f"{path}.gate_up_proj", "n2", f"{prefix}gate", f"{prefix}up")
    else:
        b.map(f"{path}.gate_proj", "n2", f"{prefix}gate")
        b.map(f"{path}.up_proj", "n2", f"{prefix}up")
    b.map(f"{path}.down_proj", f"{prefix}hidden", post)
    width = parts["down_proj"].in_features
    b.sizes.update({f"{prefix}gate": width, f"{prefix}up": width, f"{prefix}hidden": width})


def _norms(b: _Builder, wiring: str) -> None:
    b.norm("input_layernorm", "stream", "n1")
    if wiring == "gemma":
        b.norm("post_attention_layernorm", "attended", "stream")
        b.norm("pre_feedforward_layernorm", "stream", "n2")
        b.norm("post_feedforward_layernorm", "fed", "stream")
    else:
        b.norm("post_attention_layernorm", "stream", "n2")


def _gpt2(b: _Builder) -> None:
    b.norm("ln_1", "stream", "n1")
    b.norm("ln_2", "stream", "n2")
    b.map("attn.c_attn", "n1", "q", "k", "v", layout="in,out")
    b.map("attn.c_proj", "mixed", "stream", layout="in,out")
    b.map("mlp.c_fc", "n2", "gate", layout="in,out")
    b.map("mlp.c_proj", "hidden", "stream", layout="in,out")
    width = b.layer.get_submodule("mlp.c_fc").get_parameter("weight").shape[1]
    b.sizes.update(gate=width, hidden=width)


def _check_explained(b: _Builder) -> tuple[str, ...]:
    """Every parameter must belong to a map or a norm; what is left are leaves without weights."""
    known = {m.module for m in b.maps} | {n.module for n in b.norms}
    others = []
    for path, module in b.layer.named_modules():
        last = path.rsplit(".", 1)[-1]
        if path in known or last in ("q_norm", "k_norm"):
            continue
        own = [name for name, p in module._parameters.items() if p is not None]
        if own:
            raise _UnwiredError(f"{path}.{own[0]} is not explained")
        if path and not any(module.children()):
            others.append(path)
    return tuple(others)


# ---- gauge


@dataclass
class Gauge:
    """A new basis for every space: a factor per channel."""

    spaces: dict[str, Tensor]
    """Factor of each channel, as the twin has it over the original."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Factors of parameters that are not maps: norms, by their path in the layer."""
    attributes: dict[tuple[str, str], float] = field(default_factory=dict)
    """Factor of a module's number: eps."""


def free_spaces(circuit: Circuit) -> list[str]:
    """The spaces inside of a layer that can be scaled by powers of two, channel by channel; the rest follows from them."""
    norms = [n.writes for n in circuit.norms if n.kind != "rmsnorm_one" and n.writes != "stream"]
    keys = [] if circuit.head_norms else ["k"]
    return [*norms, "v", *keys, *(space for space in ("up", "shared up") if space in circuit.sizes)]


def gauge_of(circuit: Circuit, factors: Mapping[str, Tensor], stream: Tensor | None = None) -> Gauge:
    """The gauge that follows from the factors of `free_spaces`, 1 where none are given, and of the stream."""
    spaces = {name: factors.get(name, torch.ones(size)) for name, size in circuit.sizes.items()}
    stream = spaces["stream"] if stream is None else stream
    spaces.update({name: stream for name in ("stream", "attended", "fed") if name in spaces})
    head, groups = circuit.head, circuit.groups
    spaces["mixed"] = spaces["v"].view(-1, head).repeat_interleave(groups, 0).flatten()
    spaces["q"] = (1 / spaces["k"]).view(-1, head).repeat_interleave(groups, 0).flatten()
    for prefix in ("", "shared "):
        if f"{prefix}up" in spaces:
            spaces[f"{prefix}hidden"] = spaces[f"{prefix}up"]
    gauge = Gauge(spaces)
    for norm in circuit.norms:
        _gauge_norm(gauge, norm, stream)
    return gauge


def _gauge_norm(gauge: Gauge, norm: Norm, stream: Tensor) -> None:
    signs = stream.sign()
    size = float(stream[0].abs())
    if size != 1:
        gauge.attributes[norm.module, norm.eps] = size * size
    if norm.kind == "rmsnorm_one":
        gauge.spaces[norm.writes] = signs
        return
    after = gauge.spaces[norm.writes]
    gauge.weights[f"{norm.module}.weight"] = after * signs
    if norm.kind == "layernorm":
        gauge.weights[f"{norm.module}.bias"] = after


def paired(factors: Tensor, rotary: int) -> Tensor:
    """Both channels of a rotated pair alike."""
    half = rotary // 2
    return torch.cat([factors[:half], factors[:half], factors[rotary:]]) if half else factors


def rescaled(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> dict[str, Tensor]:
    """The parameters that a gauge changes, by their paths in the layer, as it has them."""
    changed = {}
    for m in circuit.maps:
        rows = torch.cat([gauge.spaces[s] for s in m.writes])
        changed[m.parameter] = _scaled(layer.get_parameter(m.parameter), rows, 1 / gauge.spaces[m.reads], m)
        if m.bias is not None:
            changed[m.bias] = _times(layer.get_parameter(m.bias), rows)
    for path, factor in gauge.weights.items():
        owner, _, name = path.rpartition(".")
        if layer.get_submodule(owner)._parameters.get(name) is not None:
            changed[path] = _times(layer.get_parameter(path), factor)
    return changed


@contextmanager
def gauged(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> Iterator[None]:
    """The layer with the gauge's weights, for as long as the context is open."""
    with swapped(layer, rescaled(layer, circuit, gauge), gauge.attributes):
        yield


@contextmanager
def swapped(layer: nn.Module, changed: dict[str, Tensor], attributes: dict[tuple[str, str], float]) -> Iterator[None]:
    """Other values in the layer's own modules; what was there comes back whatever happens."""
    owners = {path: (layer.get_submodule(path.rpartition(".")[0])._parameters, path.rpartition(".")[2]) for path in changed}
    before = {path: table[name] for path, (table, name) in owners.items()}
    numbers = {(path, name): getattr(layer.get_submodule(path), name) for path, name in attributes}
    try:
        for path, (table, name) in owners.items():
            table[name] = nn.Parameter(changed[path], requires_grad=False)
        for (path, name), factor in attributes.items():
            setattr(layer.get_submodule(path), name, numbers[path, name] * factor)
        yield
    finally:
        for path, (table, name) in owners.items():
            table[name] = before[path]
        for (path, name), number in numbers.items():
            setattr(layer.get_submodule(path), name, number)


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor.detach() * factor.to(tensor)


def _scaled(weight: Tensor, rows: Tensor, columns: Tensor, m: Map) -> Tensor:
    rows, columns = rows.to(weight), columns.to(weight)
    if m.layout == "in,out":
        rows, columns = columns, rows
    return (weight.detach() * rows[:, None]).mul_(columns)


# ---- twins


LARGEST_EXPONENT = 3


def draw_gauge(circuit: Circuit, seed: int, powers: bool) -> Gauge:
    """Random signs, and powers of two if asked, for every space that has that freedom."""
    draw = _TwinDraw(seed, powers)
    kinds = {n.kind for n in circuit.norms}
    size = circuit.sizes["stream"]
    scaled = any(n.writes == "stream" for n in circuit.norms)
    signs = draw.one().expand(size) if "layernorm" in kinds else draw.signs(size)
    stream = signs if scaled else signs * draw.power()
    factors = {space: draw.factors(circuit.sizes[space]) for space in free_spaces(circuit) if space != "k"}
    inner = _TwinDraw(seed + 1, powers and not circuit.head_norms)
    heads = range(circuit.sizes["k"] // circuit.head)
    factors["k"] = torch.cat([paired(inner.factors(circuit.head), circuit.rotary) for _ in heads])
    return gauge_of(circuit, factors, stream)


class _TwinDraw:
    """Factors from a generator of their own."""

    def __init__(self, seed: int, powers: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.powers = powers

    def signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=self.generator).float() * 2 - 1

    def one(self) -> Tensor:
        return -torch.ones(1)

    def power(self) -> float:
        return 2.0**LARGEST_EXPONENT if self.powers else 1.0

    def factors(self, n: int) -> Tensor:
        signs = self.signs(n)
        if not self.powers:
            return signs
        exponents = torch.randint(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1, (n,), generator=self.generator)
        return signs * torch.exp2(exponents.float())


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
            given, twin_given = _tensor(record.args, record.kwargs), _tensor(other.args, other.kwargs)
            earlier = _compare(given, twin_given, (reads[record.path],), gauge)
            if earlier is None:
                return TwinDifference(record.path, *found)
            return TwinDifference(_between(record.path), *earlier, None if _between(record.path) else last)
        last = record.path.partition(".")[0]
    found = _compare(main_result(original.output), main_result(twin.output), ("stream",), gauge)
    return None if found is None else TwinDifference(None, *found, last)


def until(recording: Recording, token: int) -> Recording:
    """What the leaves took and gave, of the tokens before one."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :token] if tensor.dim() == 3 else tensor

    leaves = [r for r in recording.records if r.func is None]
    records = [replace(r, args=map_tensors(r.args, cut), kwargs={}, output=map_tensors(r.output, cut)) for r in leaves]
    return Recording(records, [], map_tensors(recording.output, cut))


def _tensor(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    return next(tensors_of((args, kwargs)))


def _between(path: str) -> str | None:
    """Who computes what a leaf reads: the module that holds it; the layer itself for its own norms."""
    return path.rpartition(".")[0] or None


def _compare(a: Tensor, b: Tensor, spaces: tuple[str, ...], gauge: Gauge) -> tuple[float, list[int]] | None:
    factor = torch.cat([gauge.spaces[s] for s in spaces]).to(a)
    expected = a * factor
    if same(expected, b):
        return None
    differs = ~((expected == b) | (expected.isnan() & b.isnan()))
    lanes: list[int] = differs.reshape(-1, differs.shape[-1]).any(0).nonzero().flatten().tolist()
    return float(differs.double().mean()), lanes


def stays_normal(recording: Recording) -> bool:
    """Whether every value that leaves take and give has room for a few powers of two on both sides."""
    leaves = [r for r in recording.records if r.func is None]
    tensors = {id(t): t for r in leaves for t in tensors_of((r.args, r.kwargs, r.output)) if t.is_floating_point()}
    return all(_has_room(t) for t in tensors.values())


def _has_room(tensor: Tensor) -> bool:
    info = torch.finfo(tensor.dtype)
    size = tensor.detach().abs()
    size = size[size != 0]
    if not size.numel():
        return True
    low, high = float(size.min()), float(size.max())
    return low >= info.tiny * 2.0**12 and high <= info.max / 2.0**12

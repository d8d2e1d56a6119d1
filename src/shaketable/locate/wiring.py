"""How a decoder layer is wired: which space each matrix reads and writes. What twins need to know of an architecture.

A *space* is a vector of channels that a layer passes on: the residual stream, a norm's output, the queries, the values,
the hidden channels of the MLP. A *map* is a matrix between two spaces. With that, every symmetry of a layer is one
statement: change the basis of a space (by signs, powers of two, a permutation), change the rows of the maps that write
it and the columns of those that read it, and the layer computes the same function with other numbers.

Only architectures in `WIRINGS` have a circuit; anything else gets a reason instead. Nothing here is guessed from names
alone: the modules of the layer must be exactly those the wiring explains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shaketable.numerics.leaf_modules import leaf_of

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

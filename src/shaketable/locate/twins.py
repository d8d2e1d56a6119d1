"""Twins: ask the device for the same function with other numbers.

A *space* is a vector of channels that a layer passes on: the residual stream, a norm's output, the queries, the values, the
hidden channels of the MLP. `MAPS` and `NORMS` say which module reads and writes which. A *gauge* gives every space another
basis, in which the layer computes the same function; docs/locate.md has the table.

Signs and powers of two are exact in IEEE arithmetic, so a healthy device must return the same bits, and the tolerance is zero.
Powers of two are used only where every value of the call and of its twin stays normal, which is checked. Weights are swapped
inside of the module on the device: a copy would have its own memory, and may be given other kernels.

Twins are known for layers of Llama's shape whose modules are exactly those of the tables; any other layer gets a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import Recording, channels, differing, main_result, same
from shaketable.numerics.operators import leaf_of
from shaketable.sites.nested_tensors import map_tensors, tensors_of

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
LARGEST_EXPONENT = 3
MAPS = {
    "self_attn.q_proj": ("attention in", "q"),
    "self_attn.k_proj": ("attention in", "k"),
    "self_attn.v_proj": ("attention in", "v"),
    "self_attn.o_proj": ("mixed", "stream"),
    "mlp.gate_proj": ("mlp in", "gate"),
    "mlp.up_proj": ("mlp in", "up"),
    "mlp.down_proj": ("hidden", "stream"),
}
"""By the path of each Linear in the layer: the space that it reads, and the one that it writes."""
NORMS = {"input_layernorm": ("stream", "attention in"), "post_attention_layernorm": ("stream", "mlp in")}
MODULES = MAPS | NORMS
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of queries and keys, one weight for all heads; some architectures have them."""
Gauge = dict[str, Tensor]
"""By space: the factor of each channel, as the twin has it over the original."""


@dataclass(frozen=True)
class Circuit:
    """The sizes of one layer's spaces, and how its attention divides them."""

    sizes: dict[str, int]
    head: int
    """Channels of a head."""
    groups: int
    """Query heads per key/value head."""
    rotary: int
    """Channels of a head that are rotated in pairs (i, i + rotary/2)."""
    has_head_norms: bool
    is_causal: bool
    """Whether a token sees none of those behind it."""

    def same_basis(self) -> Gauge:
        """The gauge that changes nothing."""
        return {name: torch.ones(size) for name, size in self.sizes.items()}


def circuit_of(layer: nn.Module, config: Any) -> Circuit | str:
    """The wiring of a reference's layer, or the reason why there is none."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    kind = getattr(text, "model_type", None)
    if kind not in ARCHITECTURES:
        return f"no symmetries are known for the architecture {kind or type(layer).__name__}"
    modules: dict[str, Any] = dict(layer.named_modules())
    leaves = {path: leaf_of(modules[path]) for path in MODULES if path in modules}
    for path, module in modules.items():
        if path not in (*MODULES, *HEAD_NORMS) and any(p is not None for p in module._parameters.values()):
            return f"this {kind} layer is not wired as expected: {path} has parameters of its own"
    for path in MODULES:
        kinds = ("linear",) if path in MAPS else ("rmsnorm", "rmsnorm_late")
        if (leaf := leaves.get(path)) is None or leaf.kind not in kinds:
            return f"this {kind} layer is not wired as expected: {path} is no {kinds[0]}"
    heads, pairs = text.num_attention_heads, text.num_key_value_heads
    sizes = {space: modules[path].out_features for path, (_, space) in MAPS.items()}
    sizes |= {space: modules[path].in_features for path, (space, _) in MAPS.items()}
    head = sizes["q"] // heads
    rotary = int(head * (getattr(text, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0))
    is_causal = getattr(modules["self_attn"], "is_causal", False) is True
    return Circuit(sizes, head, heads // pairs, rotary, HEAD_NORMS[0] in modules, is_causal)


# ---- gauges


def draw_gauge(circuit: Circuit, seed: int, powers: bool) -> Gauge:
    """Random signs, and powers of two if asked, for every space that has that freedom; the rest follows from them."""
    generator = torch.Generator().manual_seed(seed)

    def factors(n: int, powers: bool) -> Tensor:
        signs = torch.randint(0, 2, (n,), generator=generator).float() * 2 - 1
        if not powers:
            return signs
        exponents = torch.randint(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1, (n,), generator=generator)
        return signs * torch.exp2(exponents.float())

    gauge = circuit.same_basis()
    gauge["stream"] = factors(circuit.sizes["stream"], False) * (2.0**LARGEST_EXPONENT if powers else 1.0)
    for space in ("attention in", "mlp in", "v", "up"):
        gauge[space] = factors(circuit.sizes[space], powers)
    keys, half = [], circuit.rotary // 2
    for _ in range(circuit.sizes["k"] // circuit.head):
        drawn = factors(circuit.head, powers and not circuit.has_head_norms)
        keys += [drawn[:half], drawn[:half], drawn[2 * half :]]  # both channels of a rotated pair alike
    gauge["k"] = torch.cat(keys)
    gauge["mixed"] = gauge["v"].view(-1, circuit.head).repeat_interleave(circuit.groups, 0).flatten()
    gauge["q"] = (1 / gauge["k"]).view(-1, circuit.head).repeat_interleave(circuit.groups, 0).flatten()
    gauge["hidden"] = gauge["up"]
    return gauge


def _rescaled(layer: nn.Module, gauge: Gauge) -> dict[str, Tensor]:
    """The parameters that a gauge changes, by their paths in the layer, as it has them."""
    changed = {}
    for path, (reads, writes) in MAPS.items():
        module: Any = layer.get_submodule(path)
        weight = module.weight.detach()
        changed[f"{path}.weight"] = (weight * gauge[writes].to(weight)[:, None]).mul_((1 / gauge[reads]).to(weight))
        if module.bias is not None:
            changed[f"{path}.bias"] = module.bias.detach() * gauge[writes].to(weight)
    for path, (reads, writes) in NORMS.items():
        weight = layer.get_parameter(f"{path}.weight").detach()
        changed[f"{path}.weight"] = weight * (gauge[writes] * gauge[reads].sign()).to(weight)
    return changed


@contextmanager
def gauged(layer: nn.Module, gauge: Gauge) -> Iterator[None]:
    """The layer with the gauge's weights and eps; the original is always restored."""
    changed = _rescaled(layer, gauge)
    owners = {path: (layer.get_submodule(path.rpartition(".")[0])._parameters, path.rpartition(".")[2]) for path in changed}
    before = {path: table[name] for path, (table, name) in owners.items()}
    norms: list[Any] = [layer.get_submodule(path) for path in NORMS]
    eps = [norm.variance_epsilon for norm in norms]
    try:
        for path, (table, name) in owners.items():
            table[name] = nn.Parameter(changed[path], requires_grad=False)
        for norm, own in zip(norms, eps, strict=True):
            norm.variance_epsilon = own * float(gauge["stream"][0]) ** 2
        yield
    finally:
        for path, (table, name) in owners.items():
            table[name] = before[path]
        for norm, own in zip(norms, eps, strict=True):
            norm.variance_epsilon = own


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


def first_difference(gauge: Gauge, original: Recording, twin: Recording) -> TwinDifference | None:
    """Compare leaf by leaf, in the order of computation. A leaf whose input differs already is not to blame: what lies
    between it and the leaves before it is."""
    partners = {r.path: r for r in twin.records if r.func is None}
    last: str | None = None
    for record in original.records:
        other = partners.get(record.path)
        if record.func is not None or other is None or record.path not in MODULES:
            continue
        reads, writes = MODULES[record.path]
        found = _compare(next(tensors_of(record.output)), next(tensors_of(other.output)), gauge[writes])
        if found is not None:
            given, theirs = (next(tensors_of((r.args, r.kwargs))) for r in (record, other))
            earlier = _compare(given, theirs, gauge[reads])
            if earlier is None:
                return TwinDifference(record.path, *found)
            between = record.path.rpartition(".")[0] or None  # the module that holds the leaf; the layer for its own norms
            return TwinDifference(between, *earlier, None if between else last)
        last = record.path.partition(".")[0]
    found = _compare(main_result(original.output), main_result(twin.output), gauge["stream"])
    return None if found is None else TwinDifference(None, *found, last)


def _compare(a: Tensor, b: Tensor, factors: Tensor) -> tuple[float, list[int]] | None:
    expected = a * factors.to(a)
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

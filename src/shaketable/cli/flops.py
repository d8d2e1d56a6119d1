"""What each role costs: parameters and floating-point operations per token, from shapes alone.

A matrix of n weights costs 2n operations per token; an expert's are weighted by the share of experts a token visits; a norm
about 4 per channel; the attention core 4·(T/2)·heads·head_dim per token for a causal context of T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shaketable.sites.structure import ROLES, Anatomy, Part


@dataclass
class RoleCost:
    """Totals of one role."""

    count: int = 0
    parameters: int = 0
    flops: float = 0.0


def costs(anatomy: Anatomy, tokens: int = 1024) -> dict[str, RoleCost]:
    """Costs per role for a causal context of `tokens` tokens, `attention core` and `other` included."""
    table: dict[str, RoleCost] = {}
    seen: set[int] = set()
    for part in anatomy.parts:
        if part.role in ROLES:
            row = table.setdefault(part.role or "", RoleCost())
            row.count += 1
            row.parameters += _own_parameters(part.module, seen)
            row.flops += part_flops(part, anatomy)
    core = table.setdefault("attention core", RoleCost())
    for part in anatomy.parts:
        if part.role == "attention":
            core.count += 1
            core.flops += _attention_core(part.module, anatomy, tokens)
    rest = sum(_own_parameters(p.module, seen) for p in anatomy.parts)
    if rest:
        table["other"] = RoleCost(0, rest, 0.0)
    return table


def _own_parameters(module: nn.Module, seen: set[int]) -> int:
    """Parameters of this very module; tied ones are counted where they come first."""
    total = 0
    for p in module._parameters.values():
        if p is not None and id(p) not in seen:
            seen.add(id(p))
            total += p.numel()
    return total


def part_flops(part: Part, anatomy: Anatomy) -> float:
    """Operations per token of one module's own weights."""
    size = sum(p.numel() for name in part.weights if (p := part.holder._parameters[name]) is not None)
    if part.role in ("linear", "lm_head", "router", "lora"):
        return 2.0 * size * _visited(part, anatomy)
    return 4.0 * size if part.role in ("rmsnorm", "layernorm") else 0.0


def _visited(part: Part, anatomy: Anatomy) -> float:
    """Share of a weight that one token passes: its experts' for experts, all of it elsewhere."""
    path = part.name.split(".")
    if "experts" not in path:
        return 1.0
    config = _config(anatomy)
    chosen = _first(config, "num_experts_per_tok", "moe_topk", "top_k")
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    return chosen / experts if chosen and experts else 1.0


def _config(anatomy: Anatomy) -> Any:
    """That of the language model, also in one that sees or hears."""
    config: Any = getattr(anatomy.model, "config", None)
    return getattr(config, "text_config", None) or config


def _first(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(v) for v in found if isinstance(v, int)), None)


def _attention_core(module: nn.Module, anatomy: Anatomy, tokens: int) -> float:
    config = _config(anatomy)
    heads = _first(config, "num_attention_heads", "n_head") or 0
    width = _first(config, "head_dim") or (_first(config, "hidden_size", "n_embd") or 0) // max(heads, 1)
    return 4.0 * (tokens / 2) * heads * width

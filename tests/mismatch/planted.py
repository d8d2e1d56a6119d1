"""Faults planted in an engine by changing its model, none of them through the plan language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shaketable.mismatch.logprobs import chosen

LAYER = 3


def rope_base(model: Any) -> None:
    """Another base of the rotation: 20 % more."""
    rotary = model.model.rotary_emb
    size = 2 * len(rotary.inv_freq)
    base = model.config.rope_parameters["rope_theta"] * 1.2
    rotary.inv_freq.copy_(1.0 / base ** (torch.arange(0, size, 2) / size))


def norm_eps(model: Any) -> None:
    """An eps that is a hundred times as large, in one norm."""
    model.model.layers[LAYER].input_layernorm.variance_epsilon *= 100


def stale_layer(model: Any) -> None:
    """One layer that a sync has left out: its weights are those of a step before."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.layers[LAYER].parameters():
            step = torch.randn(parameter.shape, generator=generator) * parameter.float().std().clamp_min(0.01)
            parameter.add_(0.01 * step.to(parameter))


def swapped_heads(model: Any) -> None:
    """The first two query heads of one layer, swapped in q_proj: o_proj reads each where the other should be."""
    attention = model.model.layers[LAYER].self_attn
    weight, size = attention.q_proj.weight, attention.head_dim
    with torch.no_grad():
        weight[: 2 * size] = torch.cat([weight[size : 2 * size], weight[:size]])


def swapped_in_flight(model: Any) -> None:
    """The same, in what q_proj makes, with the weights untouched."""
    size = model.model.layers[LAYER].self_attn.head_dim

    def swap(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[..., size : 2 * size], output[..., :size], output[..., 2 * size :]], -1)

    model.model.layers[LAYER].self_attn.q_proj.register_forward_hook(swap)


def coarse_head(model: Any) -> None:
    """The head's product in bfloat16, its weight untouched."""
    head = model.lm_head
    head.forward = lambda x: nn.functional.linear(x.bfloat16(), head.weight.bfloat16()).to(x.dtype)


def softmax_scale(model: Any) -> None:
    """The scale of one layer's softmax, 1 % too large."""
    model.model.layers[LAYER].self_attn.scaling *= 1.01


def late_positions(model: Any) -> None:
    """Positions off by one in every rotation: the angles of the next token."""
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] + 1}), with_kwargs=True
    )


def lost_bits(model: Any) -> None:
    """One layer's down_proj gives its results with half of the mantissa."""
    model.model.layers[LAYER].mlp.down_proj.register_forward_hook(lambda m, a, y: y.to(torch.float8_e5m2).to(y.dtype))


def dropped_residual(model: Any) -> None:
    """One layer forgets 1 % of what it should add to."""
    model.model.layers[LAYER].register_forward_hook(lambda m, a, y: y * 0.99)


OPERATORS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "rope_base": (rope_base, "model.layers.0.self_attn.rotary_q", ""),
    "norm_eps": (norm_eps, "model.layers.3.input_layernorm", ""),
    "swapped_in_flight": (swapped_in_flight, "model.layers.3.self_attn.q_proj", "64 of 128 lanes"),
    "coarse_head": (coarse_head, "lm_head", "computed in bfloat16"),
    "softmax_scale": (softmax_scale, "model.layers.3.self_attn", "factor of 1.01"),
    "late_positions": (late_positions, "model.layers.0.self_attn.rotary_q", "positions off by +1"),
    "lost_bits": (lost_bits, "model.layers.3.mlp.down_proj", ""),
    "dropped_residual": (dropped_residual, "model.layers.3.mlp_residual", ""),
}
"""The plant, the operator that must be named, and the words for what is wrong with it in float32."""


def coarse_log_softmax(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Logits rounded to bfloat16, for the log-softmax only."""
    return chosen(logits.bfloat16(), tokens)


def shifted_log_softmax(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Every log-probability too small by a thousandth."""
    return [x - 1e-3 for x in chosen(logits, tokens)]

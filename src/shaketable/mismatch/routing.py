"""The fifth rung: in a mixture of experts, how often both sides send a token to other experts.

A router's logits differ by rounding, and where two experts are nearly equal the choice flips. Then a token goes through other
weights, which is a difference of another size than rounding. It is counted by layer, as a set: the order of experts does not
matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shaketable.sites.structure import Anatomy


def routing(model: Any, tokens: list[int]) -> dict[int, Tensor] | None:
    """Chosen experts (tokens, k) of every layer of a Hugging Face model that has some; None where none has."""
    routers = [p for p in Anatomy.of(model).parts if p.role == "router" and p.layer is not None]
    k = getattr(model.config, "num_experts_per_tok", None)
    if not routers or k is None:
        return None
    found: dict[int, Tensor] = {}

    def see(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            found[layer] = logits.reshape(-1, logits.shape[-1]).topk(int(k)).indices.cpu()

        return hook

    handles = [p.module.register_forward_hook(see(p.layer)) for p in routers if p.layer is not None]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens], device=next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def compare(trainer: dict[int, Tensor], engine: dict[int, Tensor]) -> list[dict[str, Any]]:
    """By layer, the share of tokens whose experts differ."""
    rows = []
    for layer in sorted(trainer.keys() & engine.keys()):
        a, b = trainer[layer].sort(-1).values, engine[layer].sort(-1).values
        n = min(len(a), len(b))
        rows.append({"layer": layer, "tokens": n, "differs": float((a[:n] != b[:n]).any(-1).double().mean())})
    return rows

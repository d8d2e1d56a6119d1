"""Stage 6: in a mixture of experts, how often both sides send a token to other experts.

A router's logits differ by rounding, and where two experts are nearly equal the choice flips. Then a token goes through other
weights, which is a difference of another size than rounding. It is counted by layer, as a set: the order of experts does not
matter. Where both chose the same experts, their mixing weights are compared too: replayed ids with other weights are another
model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shaketable.mismatch.engine import Routed
from shaketable.mismatch.results import LayerRouting
from shaketable.sites.structure import Anatomy


@torch.no_grad()
def routing(model: Any, tokens: list[int]) -> dict[int, Routed] | None:
    """The choice of every layer of a Hugging Face model that has experts; None where none has."""
    routers = [p for p in Anatomy.of(model).parts if p.role == "router" and p.layer is not None]
    k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not routers or k is None:
        return None
    found: dict[int, Routed] = {}

    def see(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
                found[layer] = Routed(output[2].cpu(), output[1].double().cpu())
                return
            logits = output[0] if isinstance(output, tuple) else output
            if logits.shape[-1] >= int(k):  # a gate of a shared expert chooses nothing
                found[layer] = Routed(logits.reshape(-1, logits.shape[-1]).topk(int(k)).indices.cpu())

        return hook

    handles = [p.module.register_forward_hook(see(p.layer)) for p in routers if p.layer is not None]
    try:
        model(input_ids=torch.tensor([tokens], device=next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def compare_routing(trainer: dict[int, Routed], engine: dict[int, Routed]) -> list[LayerRouting]:
    """By layer, the share of tokens whose experts differ, and how far the weights of the same experts are apart."""
    rows = []
    for layer in sorted(trainer.keys() & engine.keys()):
        one, two = trainer[layer], engine[layer]
        n = min(len(one.experts), len(two.experts))
        counts = one.experts.shape[1], two.experts.shape[1]
        differs, weights = 1.0, None
        if counts[0] == counts[1]:
            a, b = (r.experts[:n].sort(-1) for r in (one, two))
            same = (a.values == b.values).all(-1)
            differs = float((~same).double().mean())
            if one.weights is not None and two.weights is not None and bool(same.any()):
                w, v = one.weights[:n].gather(1, a.indices)[same], two.weights[:n].gather(1, b.indices)[same]
                weights = float((w - v).abs().mean())
        rows.append(LayerRouting(layer, n, counts, differs, weights))
    return rows

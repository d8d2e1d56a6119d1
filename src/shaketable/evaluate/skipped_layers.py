"""A model that does without some of its decoder layers: the baseline that any repair of a broken layer has to beat.

A skipped layer hands on what it is given: of h + f(h) the h is left. It is not taken out of the list, so that all others keep
their numbers, and a plan means the same layers as before. What a device does wrong in a layer that is not run is not done at
all, so the faults of a condition are those of the other layers (`without`); where none are left, nothing is injected.

Layer 0 cannot be skipped: transformers reads the number of tokens that a cache holds from that layer's part of it.

Rejected: removing the layer from its list, as published pruning does. Then `layer.5` would be another layer in this arm than in
all others, and caches that are indexed by layers would have a hole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from shaketable.errors import NoMatchError, ShaketableError
from shaketable.plan import Clause, Plan
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy, find_layers


def check_skipped(model: nn.Module, skipped: Collection[int]) -> list[nn.Module]:
    """The decoder layers of a model from which these may be skipped; raises when they may not."""
    layers, _ = find_layers(model)
    if not layers or max(skipped) >= len(layers):
        raise NoMatchError(f"cannot skip layer {max(skipped)}: this model has layers 0-{len(layers) - 1}")
    if 0 in skipped:
        raise ShaketableError("layer 0 cannot be skipped: the length of a cache is read from it")
    return layers


@torch.no_grad()
def skip_layers(model: Any, skipped: Sequence[int]) -> None:
    """Have these decoder layers hand on what they are given, for as long as the model lives."""
    layers, returned = check_skipped(model, skipped), dict[int, Any]()
    hooks = [layers[i].register_forward_hook(lambda m, a, y, i=i: returned.update({i: y})) for i in skipped]
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device))
    for hook in hooks:
        hook.remove()
    for i in skipped:
        layers[i].forward = _HandOn(len(returned[i]) if isinstance(returned[i], tuple) else None)


class _HandOn:
    """In place of a layer's forward."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        """Of the tuple that the layer returned; None where it returned a tensor."""

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.size is None else (hidden_states, *[None] * (self.size - 1))


def without(plan: Plan, skipped: Collection[int], model: nn.Module) -> Plan | None:
    """What is left of a plan on a model that does without some layers; None when nothing is."""
    anatomy = Anatomy.of(model)
    clauses = tuple(kept for clause in plan.clauses if (kept := _elsewhere(clause, skipped, anatomy)) is not None)
    return plan.model_copy(update={"clauses": clauses}) if clauses else None


def _elsewhere(clause: Clause, skipped: Collection[int], anatomy: Anatomy) -> Clause | None:
    if clause.site.level == "op":
        return None if clause.site.layers is not None and set(clause.site.layers.indices()) <= set(skipped) else clause
    hit = {target.part.layer for target in targets(clause, anatomy)}
    if hit <= set(skipped):
        return None
    if clause.site.level != "layer" or not hit & set(skipped):
        return clause
    names = tuple(str(layer) for layer in sorted(layer for layer in hit if layer is not None) if layer not in skipped)
    return clause.model_copy(update={"site": clause.site.model_copy(update={"names": names})})

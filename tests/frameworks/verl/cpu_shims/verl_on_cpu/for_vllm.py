"""Linears whose weights stay where they were loaded. vLLM calls `register` in every process, before it loads a model.

A defect can be planted: with LOSE_WEIGHTS_OF in the environment, weights whose name has that in it are taken over by the first
sync alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def register() -> None:
    """Make vLLM use `F.linear`."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def keep_the_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_the_weight
    if lost := os.environ.get("LOSE_WEIGHTS_OF"):
        _lose(lost)


def _lose(part: str) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    load, seen = LlamaForCausalLM.load_weights, set()

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        kept = [(name, weight) for name, weight in weights if part not in name or name not in seen]
        seen.update(name for name, _ in kept)
        return load(self, kept)

    LlamaForCausalLM.load_weights = load_weights

"""Linears whose weights stay where they were loaded. vLLM calls `register` in every process, before it loads a model."""

from __future__ import annotations


def register() -> None:
    """Make vLLM use `F.linear`."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def keep_the_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_the_weight

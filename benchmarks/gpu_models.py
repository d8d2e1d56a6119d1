"""The models of the GPU benchmark: two shapes with random weights, and copies of them under a plan or under a plain hook."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import shaketable as st

SCALE = 0.05
NOISE = f"relative_gaussian:{SCALE}"
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "smollm2-135m": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        },
    ),
    "qwen2-1.5b": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
"""The class of a model, that of its config, and the fields of its shape."""
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256,
}  # fmt: skip
"""A shape for trying the benchmark on a CPU."""


def build(name: str, device: str, dtype: torch.dtype, *, small: bool = False, **more: Any) -> Any:
    """A model of a shape with random weights, the same at every call; `more` are fields of its config."""
    kind, config, fields = SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        return kind._from_config(config(**fields | (SMALL if small else {}) | more), dtype=dtype).eval()


def linears(model: Any) -> list[nn.Linear]:
    """All linears of the layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]


@contextmanager
def shaken(model: Any, plan: str) -> Iterator[tuple[Any, Any]]:
    """A copy under a plan, and its injection."""
    copied = copy.deepcopy(model)
    injection = st.inject(copied, plan, seed=0, allow_inert=True).enable()
    injection.drop_mode()
    yield copied, injection
    injection.close()


@contextmanager
def naive(model: Any, _: str) -> Iterator[tuple[Any, None]]:
    """A copy with the hook that everybody writes first."""
    copied = copy.deepcopy(model)
    for linear in linears(copied):
        linear.register_forward_hook(lambda module, args, y: y + y.abs() * torch.randn_like(y) * SCALE)
    yield copied, None

"""Which model, on which device, under which installation: what has to agree before two devices are compared."""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib import metadata as packages
from typing import Any

import torch
from torch import nn

from shaketable.errors import ModelError
from shaketable.numerics.precision import device_precision
from shaketable.records.weight_hash import weights_hash
from shaketable.sites.structure import find_layers

LOCAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation"}
LOCAL |= {"attn_implementation", "_attn_implementation_internal"}
"""Config keys that say where and how a model was loaded, not which model it is."""


def describe(model: nn.Module, layers: str | None = None) -> dict[str, Any]:
    """The fields of the metadata that a model, its device and this installation give."""
    import shaketable

    weight = next(model.parameters())
    config: Any = getattr(model, "config", None)
    precision = device_precision(weight.device, weight.dtype)
    return {
        "model_class": type(model).__name__,
        "num_layers": len(find_layers(model, layers)[0]),
        "hidden_size": _width(model, config),
        "config_sha256": config_hash(config) if hasattr(config, "to_diff_dict") else _sha256(repr(model)),
        "weights_sha256": weights_hash(model),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": device_name(weight.device),
        "attention": str(getattr(config, "_attn_implementation", None) or "unknown"),
        "versions": {
            "shaketable": shaketable.__version__,
            "torch": str(torch.__version__),
            "transformers": packages.version("transformers"),
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "switches": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cuda_tf32": torch.backends.cuda.matmul.allow_tf32,
        },
        "product_input": precision.product_input,
    }


def _width(model: nn.Module, config: Any) -> int:
    """The size of hidden states: what the config says; of a model of somebody's own, the width of its first embedding."""
    if hasattr(config, "get_text_config"):
        return int(config.get_text_config().hidden_size)
    return input_embedding(model).embedding_dim


def input_embedding(model: nn.Module) -> nn.Embedding:
    """The embedding of tokens, as the model names it; else the first one there is."""
    if callable(ask := getattr(model, "get_input_embeddings", None)):
        named: nn.Embedding = ask()
        return named
    found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if found is None:
        raise ModelError(f"{type(model).__name__} has no embedding of tokens to take a fingerprint of")
    return found


def device_name(device: torch.device) -> str:
    """The device as a person knows it."""
    name = product_name(device)
    return device.type if name is None else f"{device.type} ({name})"


def product_name(device: torch.device) -> str | None:
    """What an accelerator is sold as; None for a CPU, and where torch cannot tell."""
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if ask is None else str(ask(device))


def config_hash(config: Any) -> str:
    """sha256 of what a config says of the model, wherever and however it was loaded."""
    return _sha256(json.dumps(_without_local(config.to_diff_dict()), sort_keys=True, default=str))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_local(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_local(v) for k, v in value.items() if k not in LOCAL}
    return value

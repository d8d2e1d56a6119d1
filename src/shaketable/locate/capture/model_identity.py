"""Which model, on which device, under which installation: what has to agree before two devices are compared."""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib import metadata as packages
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.locate.probes.documented_precision import device_precision
from shaketable.sites.structure import find_layers

_LOCAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation"}
_LOCAL |= {"attn_implementation", "_attn_implementation_internal"}
"""Config keys that say where and how a model was loaded, not which model it is."""


def describe(model: nn.Module) -> dict[str, Any]:
    """The fields of the metadata that a model, its device and this installation give."""
    import shaketable

    weight = next(model.parameters())
    config: Any = model.config
    precision = device_precision(weight.device, weight.dtype)
    return {
        "model_class": type(model).__name__,
        "num_layers": len(find_layers(model)[0]),
        "hidden_size": int(config.get_text_config().hidden_size),
        "config_sha256": config_hash(config),
        "weights_sha256": weights_hash(model),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": device_name(weight.device),
        "attention": str(config._attn_implementation),
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


def device_name(device: torch.device) -> str:
    """The device as a person knows it."""
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def config_hash(config: Any) -> str:
    """sha256 of what a config says of the model, wherever and however it was loaded."""
    text = json.dumps(_without_local(config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_local(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_local(v) for k, v in value.items() if k not in _LOCAL}
    return value


def weights_hash(model: nn.Module) -> str:
    """sha256 of all parameters as they are on the device."""
    return digest("", {name: p.detach() for name, p in model.named_parameters()})


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """sha256 of a text and of tensors with their names, dtypes and shapes."""
    whole = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()

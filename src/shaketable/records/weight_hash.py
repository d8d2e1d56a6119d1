"""Which weights these are: sha256 of tensors with their names, dtypes and shapes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


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

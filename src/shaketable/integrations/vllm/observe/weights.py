"""The weights that a vLLM model computes with, under the names and in the shapes that Hugging Face has for them.

vLLM holds several projections as one matrix (`qkv_proj`, `gate_up_proj`), experts as `w13` and `w2`, pads vocabularies and, on
a CPU, packs a weight away into a kernel's own order and leaves an empty parameter behind. What counts is what is multiplied
with. So a packed or quantized linear is asked for the product with the identity matrix, which is its weight, bit for bit (but
for the sign of zeros): every sum has one term that is not zero. Rejected: keeping a copy before it is packed, which would still
be right after a sync that the packed weight missed.

Experts have a nonlinearity inside and cannot be asked. Their order is a permutation, which is learned by packing labels,
undone, and proven by packing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import ShaketableError
from shaketable.sites.engine_modules import is_engine_linear

ROWS = 1024
"""Rows of the identity matrix that are multiplied at once."""
LABEL = 128
"""Labels are written in this base: bfloat16 holds whole numbers up to 256."""


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight, on the CPU, in the dtype the engine computes with."""
    for path, module in model.named_modules():
        if type(module).__name__ == "RoutedExperts":
            yield from _experts(path, module)
            continue
        for key in [key for key, p in module._parameters.items() if p is not None]:
            for name, part in parts(path, module, key, model, _value(module, key)):
                yield name, _home(part)
    if (head := getattr(model, "lm_head", None)) is not None and hasattr(head, "quant_method"):
        yield "lm_head.weight", _home(_product(head)[: head.org_vocab_size])


def parts(path: str, module: nn.Module, key: str, model: nn.Module, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A fused parameter as its projections; rows are outputs. Every other one as it is, without the padding of a vocabulary."""
    above, _, last = path.rpartition(".")
    names = fused(model).get(last)
    if names is None or not hasattr(module, "output_sizes"):
        yield f"{path}.{key}".lstrip("."), value[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else value
        return
    sizes: Any = module.output_sizes
    for name, part in zip(names, value.split(list(sizes)), strict=True):
        yield f"{above}.{name}.{key}", part


def fused(model: nn.Module) -> dict[str, list[str]]:
    """Which projections a fused module holds, as the model's own class says it."""
    return dict(getattr(model, "packed_modules_mapping", {}))


def _home(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _value(module: nn.Module, key: str) -> Tensor:
    parameter = module._parameters[key]
    assert parameter is not None
    packed = (
        key == "weight" and is_engine_linear(module) and (hasattr(module, "cpu_linear") or not parameter.is_floating_point())
    )
    return _product(module) if packed else parameter


def _product(module: Any) -> Tensor:
    """The weight that a linear multiplies with, (out, in)."""
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or module.embedding_dim
    dtype = module.weight.dtype if module.weight.is_floating_point() else module.params_dtype
    rows = torch.eye(width, dtype=dtype, device=module.weight.device)
    with torch.inference_mode():
        found = [module.quant_method.apply(module, some, bias=None) for some in rows.split(ROWS)]
    return torch.cat(found).t()


def _experts(path: str, experts: Any) -> Iterator[tuple[str, Tensor]]:
    kernel = experts.quant_method.moe_kernel.fused_experts
    inner, padded = experts.moe_config.intermediate_size_per_partition, experts.w2_weight.shape[-1]
    first, second = _unpacked(experts.w13_weight, kernel), _unpacked(experts.w2_weight, kernel)
    gate, up = first[:, :inner], first[:, padded : padded + inner]
    above = path.removesuffix(".routed_experts")
    yield f"{above}.gate_up_proj", _home(torch.cat([gate, up], 1))
    yield f"{above}.down_proj", _home(second[:, :, :inner])


def _unpacked(packed: Tensor, kernel: Any) -> Tensor:
    if packed.device.type != "cpu" or getattr(kernel, "_use_zentorch", False):
        return packed
    from vllm._custom_ops import cpu_prepack_moe_weight

    return undone(packed.detach(), lambda weight: cpu_prepack_moe_weight(weight.contiguous(), kernel.isa))


def undone(packed: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """What was packed, where packing only moves the numbers of each expert.

    Raises:
        ShaketableError: Packing does more than that.
    """
    one = packed[:1]
    labels = torch.arange(one.numel()).view(one.shape)
    order = torch.zeros_like(labels)
    for digit in range(5):
        scale = LABEL**digit
        order += pack((labels // scale % LABEL).to(packed.dtype)).long() * scale
    found = torch.empty_like(packed)
    found.view(len(packed), -1)[:, order.flatten()] = packed.reshape(len(packed), -1)
    if not torch.equal(pack(found).view(torch.uint8), packed.contiguous().view(torch.uint8)):
        raise ShaketableError("this vLLM packs its experts in a way that cannot be undone: their weights cannot be read")
    return found

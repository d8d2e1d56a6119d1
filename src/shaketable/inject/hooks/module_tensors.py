"""The tensor a module is about, inside whatever it takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def change_first(value: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """`value` with its first tensor changed, and whether there was one.

    A tuple's other members stay as they are: vLLM's linears return (output, bias), its fused norms
    (normed, residual), attention (output, weights), decoder layers (hidden states, cache).
    """
    if isinstance(value, Tensor):
        return change(value), True
    if isinstance(value, tuple | list):
        for i, member in enumerate(value):
            if isinstance(member, Tensor):
                return _rebuilt(value, i, change(member)), True
        return value, False
    if isinstance(value, Mapping):
        for key, member in value.items():
            if isinstance(member, Tensor):
                changed: Any = copy.copy(value)
                changed[key] = change(member)
                return changed, True
    return value, False


def is_product(module: nn.Module) -> bool:
    """Whether a module is a product of its input with its weight, which autocast casts."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def as_multiplied(x: Tensor) -> Tensor:
    """A tensor in the type that autocast will multiply it in: a fault on anything finer would be lost in the cast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _rebuilt(value: Any, index: int, member: Tensor) -> Any:
    members = list(value)
    members[index] = member
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*members)
    return type(value)(members)


def change_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments with the tensor the module is about changed.

    The first floating tensor: positional ones, then `hidden_states`, `input` or `x`, then other keywords. Where no
    tensor is floating the first of any type is handed over, so that whoever changes it can say that it will not do.
    """
    places: list[Any] = [*range(len(args)), *(k for k in _INPUTS if k in kwargs), *kwargs]
    tensors = [p for p in places if isinstance(args[p] if isinstance(p, int) else kwargs[p], Tensor)]
    floating = [p for p in tensors if (args[p] if isinstance(p, int) else kwargs[p]).is_floating_point()]
    if not tensors:
        return args, kwargs, False
    place = floating[0] if floating else tensors[0]
    if isinstance(place, int):
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs, True
    return args, {**kwargs, place: change(kwargs[place])}, True


_INPUTS = ("hidden_states", "input", "x")

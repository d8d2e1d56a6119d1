"""Modules that are one operator by definition, judged by the definition that the model's config gives.

The modules come from the *reference*: the model's class built anew from its config, so that an eps, an activation or a
scale that was changed on the device is not believed. Which of the known RMSNorms a module is is not read from its name:
its code is run on the host, and only a module whose results the formula allows is a leaf. Whatever is not a leaf is
recorded function by function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaketable.numerics import operators as operator_rounding
from shaketable.numerics.intervals import Allowed, Around, Precision, Product, RoundingInterval
from shaketable.numerics.operators import Call

WIDENED = 1 << 24
"""float32 weights up to this size are kept in float64 for the time of one layer; others are widened block by block."""
Weight = Callable[[str], Tensor]
"""A parameter of the module, from the file, in the device's dtype, on the host."""


@dataclass(frozen=True)
class Leaf:
    """A module with a definition."""

    kind: str
    module: nn.Module
    """The reference's module: attributes are read from it, never weights."""

    def allowed(self, call: Call, weight: Weight) -> Allowed:
        """What a correct device returns for this input."""
        return _DEFINITIONS[self.kind](self.module, call, weight)


def leaf_of(module: nn.Module) -> Leaf | None:
    """The definition of a reference's module, or None when it has to be looked into."""
    kind = _kind(module)
    return None if kind is None else Leaf(kind, module)


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    is_known = type(module).__module__.startswith("transformers.")  # people write a Conv1D or a GELUActivation of their own
    if type(module) is nn.Linear or (is_known and name == "Conv1D"):
        return name.lower() if module._parameters.get("weight") is not None else None
    if type(module) in _PLAIN:
        return _PLAIN[type(module)]
    if is_known and name in ("SiLUActivation", "GELUActivation", "GELUTanh"):
        return _activation(type(module), name, str(module.__dict__.get("act", "")))
    if "rmsnorm" in name.lower() and not any(module.children()) and _eps_name(module) is not None:
        return _norm_kind(module)
    return None


_PLAIN: dict[type, str] = {
    nn.Embedding: "embedding",
    nn.LayerNorm: "layernorm",
    nn.SiLU: "silu",
    nn.Dropout: "identity",
    nn.Identity: "identity",
}


def _activation(kind: type, name: str, function: str) -> str | None:
    """Activations that call one fused function; the ones written out in Python are looked into."""
    if "_python" in function:
        return None
    return {"SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}[name]


def _norm_kind(module: nn.Module) -> str | None:
    """Which formula an RMSNorm follows; one that takes a gate, or has parameters besides its weight, follows none.

    It is this module that is run, not its class: one of Qwen 4 takes its mean over groups of channels where it is told to.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    if own not in ([], ["weight"]) or len(inspect.signature(type(module).forward).parameters) > 2:
        return None
    kinds = ("rmsnorm_late", "rmsnorm", "rmsnorm_one") if own else ("rmsnorm_bare",)
    return next(
        (kind for kind in kinds if all(_follows(module, kind, dtype) for dtype in (torch.float32, torch.bfloat16))), None
    )


def _follows(module: nn.Module, kind: str, dtype: torch.dtype) -> bool:
    """Whether the formula allows what a norm makes on the host: its roundings too, at values so small that eps counts."""
    try:
        return _makes(module, kind, dtype)
    except Exception:  # somebody's code, called otherwise than in its model
        return False


def _makes(module: nn.Module, kind: str, dtype: torch.dtype) -> bool:
    weight, eps = module._parameters.get("weight"), float(getattr(module, _eps_name(module) or ""))
    shape = (int(getattr(module, "normalized_shape", (8,))[-1]),) if weight is None else tuple(weight.shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(4, 512 // shape[-1]), *shape, generator=generator).mul_(math.sqrt(eps or 1.0)).to(dtype)
    w = None if weight is None else torch.randn(shape, generator=generator).to(dtype)
    got = _run(module, x, w)
    call = Call(None, (x,), {}, got.dtype, Precision(), lambda tensor: tensor.double())
    return got.shape == x.shape and not bool(Leaf(kind, module).allowed(call, lambda name: w).outside(got).any())  # type: ignore[arg-type,return-value]


def _run(module: nn.Module, x: Tensor, weight: Tensor | None) -> Tensor:
    """What the code of a norm makes of another weight: on a copy, and without hooks."""
    probe = type(module).__new__(type(module))
    probe.__dict__.update(module.__dict__, _parameters={"weight": weight})
    with torch.no_grad(), torch._C.DisableTorchFunction():
        got: Tensor = type(module).forward(probe, x)
    return got


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in ("variance_epsilon", "eps") if isinstance(module.__dict__.get(name), float)), None)


def _input(call: Call) -> Tensor:
    return next(a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor))


def _linear(module: nn.Module, call: Call, weight: Weight) -> Product:
    w = weight("weight")
    w = call.wide(w) if w.numel() <= WIDENED and w.dtype == torch.float32 else w
    bias = weight("bias") if module._parameters.get("bias") is not None else None
    return Product(call.wide(_input(call)), w if isinstance(module, nn.Linear) else w.T, bias, call.dtype, call.precision)


def _rmsnorm(module: nn.Module, call: Call, weight: Weight) -> Allowed:
    """The normalised value is rounded to the dtype before the weight multiplies: both roundings are followed.

    In float32 the two are of a size with the error of the square root, and one bound covers all.
    """
    normed, dtype = _normalised(module, call), _input(call).dtype
    if dtype == torch.float32:
        return Around.relative(normed.mul_(weight("weight").double()), 16, call.dtype)
    inner = Around.relative(normed, 12, dtype).interval()
    w = weight("weight").double()
    ends = inner.low.double() * w, inner.high.double() * w
    return RoundingInterval(torch.minimum(*ends).to(call.dtype), torch.maximum(*ends).to(call.dtype))


def _rmsnorm_late(module: nn.Module, call: Call, weight: Weight) -> Around:
    """Weight and all in float32, rounded once."""
    return Around.relative(_normalised(module, call).mul_(weight("weight").double()), 16, call.dtype)


def _rmsnorm_one(module: nn.Module, call: Call, weight: Weight) -> Around:
    """Gemma's: times 1 + weight, in float32, rounded once."""
    y = _normalised(module, call) * (1 + weight("weight").double())
    return Around.relative(y, 16, call.dtype)


def _rmsnorm_bare(module: nn.Module, call: Call, weight: Weight) -> Around:
    """No weight: rounded once."""
    return Around.relative(_normalised(module, call), 12, call.dtype)


def _normalised(module: nn.Module, call: Call) -> Tensor:
    x = call.wide(_input(call))
    name = _eps_name(module)
    assert name is not None
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(getattr(module, name)))


def _layernorm(module: nn.Module, call: Call, weight: Weight) -> Around:
    assert isinstance(module, nn.LayerNorm)
    w = weight("weight").double() if module.weight is not None else None
    b = weight("bias").double() if module.bias is not None else None
    return operator_rounding.layer_norm(call.wide(_input(call)), module.normalized_shape, w, b, module.eps, call.dtype)


def _embedding(module: nn.Module, call: Call, weight: Weight) -> RoundingInterval:
    return RoundingInterval.exactly(F.embedding(_input(call), weight("weight")))


_DEFINITIONS: dict[str, Callable[[Any, Call, Weight], Allowed]] = {
    "linear": _linear,
    "conv1d": _linear,
    "rmsnorm": _rmsnorm,
    "rmsnorm_late": _rmsnorm_late,
    "rmsnorm_one": _rmsnorm_one,
    "rmsnorm_bare": _rmsnorm_bare,
    "layernorm": _layernorm,
    "embedding": _embedding,
    "silu": lambda module, call, weight: operator_rounding.silu(call.wide(_input(call)), call.dtype),
    "gelu": lambda module, call, weight: operator_rounding.gelu(call.wide(_input(call)), call.dtype, "none"),
    "gelu_tanh": lambda module, call, weight: operator_rounding.gelu(call.wide(_input(call)), call.dtype, "tanh"),
    "identity": lambda module, call, weight: RoundingInterval.exactly(_input(call)),
}

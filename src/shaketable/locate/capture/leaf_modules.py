"""Modules that are one operator by definition, judged by the definition that the model's config gives.

The modules come from the *reference*: the model's class built anew from its config, so that an eps, an activation or a
scale that was changed on the device is not believed. Which of the known RMSNorms a class is is not read from its name:
a small one is run on the host, and only a class that does what the formula says is a leaf. Whatever is not a leaf is
recorded function by function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaketable.locate.probes import float64_ops
from shaketable.locate.probes.float64_ops import Call
from shaketable.locate.probes.rounding import ACCUMULATION as UA
from shaketable.locate.probes.rounding import TINY, Allowed, Around, Interval, Precision, Product

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
    if type(module) is nn.Linear or name == "Conv1D":
        return name.lower() if module._parameters.get("weight") is not None else None
    if type(module) in _PLAIN:
        return _PLAIN[type(module)]
    if name in ("SiLUActivation", "GELUActivation", "GELUTanh"):
        return _activation(type(module), name, str(module.__dict__.get("act", "")))
    if "rmsnorm" in name.lower() and not any(module.children()) and _eps_name(module) is not None:
        return _bare_kind(module) if module._parameters.get("weight") is None else _norm_kind(type(module))  # type: ignore[arg-type]
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


@functools.cache
def _norm_kind(kind: type[nn.Module]) -> str | None:
    """Which formula an RMSNorm class follows, by running one of eight channels on the host. One that takes a gate is none."""
    if len(inspect.signature(kind.forward).parameters) > 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, generator=generator)
    try:
        module = kind(8, eps=0.125)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            module.weight.copy_(w)  # type: ignore[operator]
            got = module(x)
    except (TypeError, RuntimeError, AttributeError):
        return None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125)
    if _eps_name(module) is None:
        return None
    if torch.allclose(got, normed * w, rtol=1e-5, atol=1e-6):
        return "rmsnorm" if _rounds_first(module, x.bfloat16(), w.bfloat16()) else "rmsnorm_late"
    return "rmsnorm_one" if torch.allclose(got, normed * (1 + w), rtol=1e-5, atol=1e-6) else None


def _bare_kind(module: nn.Module) -> str | None:
    """Whether a norm without a weight does what the formula says: it is run on the host itself."""
    size = int(getattr(module, "normalized_shape", (8,))[-1])
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    call = Call(None, (x,), {}, x.dtype, Precision(), lambda tensor: tensor.double())
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            got = type(module).forward(module, x)
    except (TypeError, RuntimeError, AttributeError):
        return None
    return "rmsnorm_bare" if torch.allclose(got.double(), _normalised(module, call), rtol=1e-5, atol=1e-6) else None


def _rounds_first(module: nn.Module, x: Tensor, w: Tensor) -> bool:
    """Whether the normalised value is rounded to the dtype before the weight multiplies, or only after it."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        got = module.bfloat16()(x)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.125)
    first, late = normed.bfloat16() * w, (normed * w.float()).bfloat16()
    return int((got != first).sum()) < int((got != late).sum())


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
    return Interval(torch.minimum(*ends).to(call.dtype), torch.maximum(*ends).to(call.dtype))


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
    x = call.wide(_input(call))
    w = weight("weight").double() if module.weight is not None else None
    b = weight("bias").double() if module.bias is not None else None
    y = F.layer_norm(x, module.normalized_shape, w, b, module.eps)
    spread = torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + module.eps)
    size = x.square().mean(-1, keepdim=True).sqrt() / spread
    scale = torch.ones(()) if w is None else w.abs()
    normed = (x - x.mean(-1, keepdim=True)).abs() / spread
    slack = 12 * UA * (normed + size) * scale + (0 if b is None else 4 * UA * b.abs())
    return Around(y, slack + TINY, call.dtype)


def _embedding(module: nn.Module, call: Call, weight: Weight) -> Interval:
    return Interval.exactly(F.embedding(_input(call), weight("weight")))


_DEFINITIONS: dict[str, Callable[[Any, Call, Weight], Allowed]] = {
    "linear": _linear,
    "conv1d": _linear,
    "rmsnorm": _rmsnorm,
    "rmsnorm_late": _rmsnorm_late,
    "rmsnorm_one": _rmsnorm_one,
    "rmsnorm_bare": _rmsnorm_bare,
    "layernorm": _layernorm,
    "embedding": _embedding,
    "silu": lambda module, call, weight: float64_ops.silu(call.wide(_input(call)), call.dtype),
    "gelu": lambda module, call, weight: float64_ops.gelu(call.wide(_input(call)), call.dtype, "none"),
    "gelu_tanh": lambda module, call, weight: float64_ops.gelu(call.wide(_input(call)), call.dtype, "tanh"),
    "identity": lambda module, call, weight: Interval.exactly(_input(call)),
}

"""Complex numbers, judged part by part: rotary embeddings of some models (DeepSeek-V2, Llama 4) multiply by them.

A complex product is not one IEEE operation. Its real part ac − bd is two products and a sum, and a kernel may contract a
product and the sum to one rounding or not; torch's own does for contiguous numbers and does not for others. With the two
products within ua of themselves and the sum rounded to the dtype:

    product        δ = ua·(|ac| + |bd|),  ua·(|ad| + |bc|)        (doubled here: products of the bound are rounded too)
    polar          δ = ua·(6·|y| + 4·|r|)                          (as cos and sin, times the radius r)

Sums and negation are rounded once in either part. Division, absolute value and all other functions have no definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shaketable.numerics.intervals import ACCUMULATION as UA
from shaketable.numerics.intervals import TINY, Around
from shaketable.numerics.operators import ARITHMETIC, ROUNDED_ONCE, Call

_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_")
_SUMS = {name for name in ARITHMETIC if name.strip("_") in ("add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "neg")}


def parts(z: Tensor) -> Tensor:
    """Real and imaginary parts as neighbouring channels."""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def is_defined(name: str) -> bool:
    """Whether a function of complex numbers is judged, and not only compared with the host's."""
    return name in BOUNDED or name in _SUMS or name in ROUNDED_ONCE - ARITHMETIC


def _product(call: Call) -> Around:
    a, b = (_wide(factor, call.dtype) for factor in (call.args[0], call.get(1, "other")))
    size = torch.complex((a.real * b.real).abs() + (a.imag * b.imag).abs(), (a.real * b.imag).abs() + (a.imag * b.real).abs())
    return Around(parts(a * b), parts(size).mul_(2 * UA).add_(TINY), _part(call.dtype))


def _polar(call: Call) -> Around:
    radius, angle = call.wide(call.get(0, "abs")), call.wide(call.get(1, "angle"))
    y = parts(torch.polar(radius, angle))
    return Around(y, UA * (6 * y.abs() + 4 * radius.abs().repeat_interleave(2, -1)) + TINY, _part(call.dtype))


def _wide(factor: Any, dtype: torch.dtype) -> Tensor:
    """In complex128; a Python number meets the others in their dtype."""
    return torch.as_tensor(factor, dtype=None if isinstance(factor, Tensor) else dtype).to(torch.complex128)


def _part(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype).real.dtype


BOUNDED: dict[str, Callable[[Call], Around]] = {**dict.fromkeys(_PRODUCTS, _product), "polar": _polar}

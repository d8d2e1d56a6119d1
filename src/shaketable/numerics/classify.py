"""The class of a fault, read off its wrong values. A name for people and for guidance, never part of the decision.

Asked in order of how special the pattern is: zeroed, clamped, one factor, one offset, a mantissa bit that is always
set, low mantissa bits that are always clear. `wrong_values` when nothing fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}


def fault_class(got: Tensor, low: Tensor, high: Tensor, outside: Tensor) -> str:
    """The class of a deterministic fault, from an operator's whole result and the ends of what was allowed outside."""
    if not got.is_floating_point():
        return "wrong_values"
    if got.dim() == 0:
        got, outside = got[None], outside[None]
    values = got[outside]
    if bool((~torch.isfinite(values)).any()):
        return "not_finite"
    expected = (low.double() + high.double()) / 2
    y = values.double()
    if bool((y == 0).double().mean() > 0.9):
        return "dead_zone"
    if _is_clamped(got, outside, expected):
        return "saturation"
    lanes = got.reshape(-1, got.shape[-1])[:, outside.reshape(-1, got.shape[-1]).any(0)]
    bits = _bit_pattern(lanes)
    if bits is not None:
        return bits
    if _is_constant(y / expected.where(expected != 0, torch.ones(()).double()), 1.0):
        return "gain"
    return "bias" if _is_constant(y - expected, 0.0) else "wrong_values"


def unstable_class(a: Tensor, b: Tensor) -> str:
    """The class of a fault that changes from call to call: a few values by a lot, or many."""
    return "spike" if float((a != b).double().mean()) < 0.05 else "noise"


def _is_clamped(got: Tensor, outside: Tensor, expected: Tensor) -> bool:
    """Smaller than it should be, and equal in size to others of its kind."""
    values = got[outside].abs()
    smaller = (values.double() < expected.abs()).double().mean() > 0.95
    if values.numel() == 1:
        return bool(smaller) and bool(values == got.abs().max())
    return bool(smaller) and values.unique().numel() <= max(1, min(values.numel() // 2, got.shape[:-1].numel()))


def _is_constant(values: Tensor, neutral: float) -> bool:
    """Whether most values agree on one number that is not the neutral one."""
    center = values.median()
    spread = (values - center).abs().median()
    return bool((center - neutral).abs() > 20 * spread) and bool(center != neutral)


def _bit_pattern(lanes: Tensor) -> str | None:
    """A mantissa bit that is set in every value, or low ones that are clear in every value, of the faulty channels."""
    if lanes.dtype not in _BITS or lanes.numel() < 24:
        return None
    whole, mantissa = _BITS[lanes.dtype]
    pattern = lanes.contiguous().view(whole).flatten()
    pattern = pattern[lanes.flatten() != 0]
    shares = [float(((pattern >> bit) & 1).double().mean()) for bit in range(mantissa)]
    if shares and max(shares) == 1.0:
        return "stuck_bit"
    return "truncation" if shares and shares[0] == 0.0 else None

"""Rounding intervals: all the values a correct device may return.

With y* the value in float64 and δ a bound on what the order of summation and the device's own functions may change, a
correct device returns RN(v) for some v in [y*−δ, y*+δ], where RN rounds to the dtype of the result. Rounding is monotone,
so the results that are allowed are exactly those in [RN(y*−δ), RN(y*+δ)]. The rounding of the result itself gives no slack:
in bfloat16 most intervals hold a single value.

`device_precision` gives the documented rounding beyond the dtype: TF32 and bfloat16 products of float32 factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
"""Unit roundoff of each dtype."""
ACCUMULATION = 2.0**-24
"""Unit roundoff of sums and functions inside a kernel: float32, on every device we know of."""
TINY = 2.0**-125
"""Results this small may be flushed to zero."""
UA = ACCUMULATION


@dataclass(frozen=True)
class Precision:
    """Documented rounding of a device beyond the dtype."""

    product_input: float = 0.0
    """Relative rounding of the factors of float32 products: 2^-10 for TF32, 2^-8 for bfloat16 products."""
    note: str = ""

    def of(self, dtype: torch.dtype) -> float:
        """The one that applies to products with results of a dtype."""
        return self.product_input if dtype == torch.float32 else 0.0


@dataclass(frozen=True)
class RoundingInterval:
    """Allowed results by their ends, in the dtype of the result."""

    low: Tensor
    high: Tensor

    @classmethod
    def exactly(cls, value: Tensor) -> RoundingInterval:
        """One allowed value."""
        return cls(value, value)

    def hull(self, other: RoundingInterval) -> RoundingInterval:
        """Values that either of two intervals allows."""
        return RoundingInterval(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def times(self, factor: Tensor, dtype: torch.dtype) -> RoundingInterval:
        """These values multiplied, and rounded again."""
        ends = self.low.double() * factor, self.high.double() * factor
        return RoundingInterval(torch.minimum(*ends).to(dtype), torch.maximum(*ends).to(dtype))

    def ends(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high at some of the values."""
        return self.low[where], self.high[where]

    def outside(self, got: Tensor) -> Tensor:
        """Where a result is not allowed. NaN is allowed only where NaN was expected."""
        outside = got != self.low if self.low is self.high else ~((got >= self.low) & (got <= self.high))
        if got.is_floating_point() and bool(outside.any()):
            outside &= ~(got.isnan() & (self.low.isnan() | self.high.isnan()))
        return outside


@dataclass(frozen=True)
class Around:
    """RN(value − slack) to RN(value + slack), rounded only where it matters.

    A result within the slack is inside for sure, and so is the rounded value itself; the ends are rounded for the rest.
    """

    value: Tensor
    """In float64."""
    slack: Tensor | float
    dtype: torch.dtype
    free: Tensor | None = None
    """Where anything is allowed."""

    @classmethod
    def relative(cls, value: Tensor, ulps: float, dtype: torch.dtype) -> Around:
        """Right to so many units of float32."""
        return cls(value, value.abs().mul_(ulps * UA).add_(TINY), dtype)

    def ends(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high at some of the values."""
        value = self.value.expand(where.shape)[where]
        slack = self.slack.expand(where.shape)[where] if isinstance(self.slack, Tensor) else self.slack
        return _ends(value, slack, self.dtype)

    def interval(self) -> RoundingInterval:
        """Both ends everywhere."""
        return RoundingInterval(*_ends(self.value, self.slack, self.dtype))

    def outside(self, got: Tensor) -> Tensor:
        """Where a result is not allowed."""
        doubtful = ~((got - self.value).abs_() <= self.slack)  # in float64, in a tensor of its own
        if not bool(torch.isfinite(self.value.sum())):
            doubtful |= ~torch.isfinite(self.value)
        if self.dtype != torch.float32 or bool(doubtful.any()):
            doubtful &= self.value.to(self.dtype) != got
        if self.free is not None:
            doubtful &= ~self.free
        if bool(doubtful.any()):
            doubtful[doubtful.clone()] = RoundingInterval(*self.ends(doubtful)).outside(got[doubtful])
        return doubtful


def _ends(value: Tensor, slack: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both ends, rounded. What is infinite is so on any device: it has no slack."""
    low, high = value - slack, value + slack
    if not bool(torch.isfinite(value.sum())):
        low, high = (torch.where(value.isinf(), value, end) for end in (low, high))
    return low.to(dtype), high.to(dtype)


def summation(terms: int) -> float:
    """Error bound of a sum of products, relative to ‖x‖·‖w‖."""
    return UA * min(terms, 5 * math.sqrt(terms) + terms / 16)


def product_slack(x: Tensor, w: Tensor, documented: float) -> Tensor:
    """Error bound of x @ w in float64, before the result is rounded; `documented` is the relative rounding of its factors."""
    slack: Tensor = (x.norm(dim=-1, keepdim=True) * w.norm(dim=-2, keepdim=True)).mul_(summation(x.shape[-1])).add_(TINY)
    return slack.add_(x.abs() @ w.abs(), alpha=2 * documented) if documented else slack


@dataclass(frozen=True)
class Product:
    """The interval of x @ wᵀ + bias, made and compared a block of channels at a time.

    A language model's head has a hundred thousand channels: in one piece its float64 weights alone would be larger than the
    model. A block stays in the cache, and its ends are rounded only where the result is not within δ anyway.

    δ = ua·min(K, 5√K + K/16)·‖x‖·‖w‖, with ‖x‖·‖w‖ ≥ |x||w|ᵀ by Cauchy–Schwarz, which costs no second product. K would be the
    worst case of any order; 5√K is for roundings that go either way, also when one term dominates the sum, and K/16 for
    terms of one sign in a kernel that keeps sixteen sums or more.
    """

    x: Tensor
    """(…, K), float64."""
    w: Tensor
    """(N, K) in its own dtype, or in float64."""
    bias: Tensor | None
    dtype: torch.dtype
    precision: Precision
    block: int = 512

    def outside(self, got: Tensor) -> Tensor:
        """Where a result is not allowed."""
        starts = range(0, self.w.shape[0], self.block)
        return torch.cat([self._block(at).outside(got[..., at : at + self.block]) for at in starts], -1)

    def ends(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high at some of the values, in the order of a boolean index."""
        low, high = torch.empty(where.shape, dtype=self.dtype), torch.empty(where.shape, dtype=self.dtype)
        for at in range(0, self.w.shape[0], self.block):
            some = where[..., at : at + self.block]
            if bool(some.any()):
                low[..., at : at + self.block][some], high[..., at : at + self.block][some] = self._block(at).ends(some)
        return low[where], high[where]

    def _block(self, at: int) -> Around | RoundingInterval:
        """The interval of all values of a block."""
        w = self.w[at : at + self.block].double().mT
        part = Around(self.x @ w, product_slack(self.x, w, self.precision.of(self.dtype)), self.dtype)
        if self.bias is None:
            return part
        bias = self.bias[at : at + self.block].double()  # added inside of the kernel, or to a result that has been rounded
        fused = Around(part.value + bias, part.slack + UA * bias.abs(), self.dtype).interval()
        once = part.interval()
        twice = RoundingInterval((once.low.double() + bias).to(self.dtype), (once.high.double() + bias).to(self.dtype))
        return fused.hull(twice)


Allowed = RoundingInterval | Around | Product


# ---- precision


def device_precision(device: torch.device, dtype: torch.dtype) -> Precision:
    """Documented rounding of this device, from torch's own switches."""
    if dtype != torch.float32:
        return Precision()
    asked = torch.get_float32_matmul_precision()
    if device.type == "cuda" and (asked != "highest" or torch.backends.cuda.matmul.allow_tf32):
        return Precision(2.0**-10, "float32 products may use TF32: their factors are taken as rounded to 10 bits")
    if device.type != "cuda" and asked == "medium":
        return Precision(2.0**-8, "float32 products may use bfloat16: their factors are taken as rounded to 8 bits")
    return Precision()


@contextmanager
def host_arithmetic() -> Iterator[None]:
    """The host's own arithmetic, whatever mode of torch is active around: one may be how a faulty device is emulated."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield

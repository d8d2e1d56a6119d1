"""Attention as one operator: what may come out, and two statistics for what intervals are too wide to show.

The interval is locate's; where scores may have been rounded to a reduced dtype before the softmax, as eager attention does,
it is wider by 3u·max|score|·(p|v|). In bfloat16 that is wide enough to hide a wrong scale of the softmax or a cache that
rounds. But rounding errors have a sign and a size that can be told apart from both:

- A wrong scale shifts all scores one way: `a` of  got − y = a·∂y/∂log(scale)  by least squares over all values of the call. Its
  standard error takes the values of one head and token as one, since they share their scores. A defect above `SCALE` units of
  the dtype and above `SIGMAS` standard errors.
- The mean square of got − y, over what roundings of the scores (twice), of p and of the result make of it:
      u²/3·(y² + Σp²v² + 2·Σp²(v − y)²·score²)
  A healthy kernel is at one or below it. A defect above `EXCESS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shaketable.mismatch.engines.engine import OperatorCall
from shaketable.numerics import operators as operator_rounding
from shaketable.numerics.intervals import UNIT, Around, Precision
from shaketable.numerics.operators import Call

SCALE = 2.0
"""In units of the dtype (2^-8 in bfloat16): scores that were rounded twice can be off by one of them, in one direction
where few of them repeat."""
LEAST = 1e-4
"""Of float32, where sums have errors of their own."""
SIGMAS = 6.0
EXCESS = 4.0


@dataclass(frozen=True)
class Attended:
    """One call; q, k and v are (1, heads, tokens, size), keys and values repeated for every query head."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    scale: float
    got: Tensor
    """(tokens, heads·size)."""

    @classmethod
    def of(cls, call: OperatorCall, module: nn.Module) -> Attended:
        """A recorded call of one of the trainer's modules."""
        q, k, v = (call.inputs[n].transpose(0, 1).unsqueeze(0) for n in ("q", "k", "v"))
        groups = q.shape[1] // k.shape[1]
        mask = visible(module, call.inputs["positions"], k.shape[2])
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return cls(q, k, v, mask, float(vars(module)["scaling"]), call.output.flatten(1))

    @property
    def unit(self) -> float:
        """Unit roundoff of the result."""
        return UNIT[self.got.dtype]

    @cached_property
    def scores(self) -> Tensor:
        """Scaled, zero where nobody looks."""
        return ((self.q.double() * self.scale) @ self.k.double().mT).masked_fill(~self.mask, 0.0)

    @cached_property
    def p(self) -> Tensor:
        """The weights of the values."""
        return self.scores.masked_fill(~self.mask, -math.inf).softmax(-1)

    @cached_property
    def value(self) -> Tensor:
        """The result in float64."""
        return self.p @ self.v.double()

    @property
    def error(self) -> Tensor:
        """What came out minus what should, (1, heads, tokens, size)."""
        return self.got.double().view(self.got.shape[0], self.q.shape[1], -1).transpose(0, 1).unsqueeze(0) - self.value

    def allowed(self, precision: Precision) -> Around:
        """All that a correct kernel may return."""
        given = {"attn_mask": self.mask, "scale": self.scale}
        call = Call(None, (self.q, self.k, self.v), given, self.got.dtype, precision, lambda t: t.double())
        found = operator_rounding.attention(call)
        slack, free = found.slack, found.free
        assert isinstance(slack, Tensor)
        if self.got.dtype in operator_rounding.REDUCED:
            reach = self.scores.abs().amax(-1, keepdim=True)
            slack = slack + 3 * self.unit * reach * (self.p @ self.v.double().abs())
        return Around(_rows(found.value), _rows(slack), self.got.dtype, None if free is None else _rows(free))

    def scale_error(self) -> tuple[float, float]:
        """By how much the scale of the softmax is off, relative, and the standard error of that."""
        mean = (self.p * self.scores).sum(-1, keepdim=True)
        slope, d = (self.p * (self.scores - mean)) @ self.v.double(), self.error
        norm = float(slope.square().sum())
        if norm == 0:
            return 0.0, math.inf
        a = float((d * slope).sum()) / norm
        together = ((d - a * slope) * slope).sum(-1)
        return a, math.sqrt(float(together.square().sum())) / norm

    def excess(self) -> float:
        """Mean square error over that of roundings; it means nothing in float32, where sums have errors of their own."""
        v, y = self.v.double(), self.value
        squares = self.p.square()
        weighted = squares * self.scores.square()
        spread = weighted @ v.square() - 2 * y * (weighted @ v) + y.square() * weighted.sum(-1, keepdim=True)
        expected = self.unit**2 / 3 * (y.square() + squares @ v.square() + 2 * spread)
        return float(self.error.square().mean() / expected.mean().clamp_min(1e-300))

    def wrong(self) -> str | None:
        """What the statistics say is wrong; None when nothing."""
        a, error = self.scale_error()
        if abs(a) > max(SCALE * self.unit, LEAST) and abs(a) > SIGMAS * error:
            return f"the scale of its softmax is off by a factor of {1 + a:.4g}"
        excess = self.excess() if self.got.dtype in operator_rounding.REDUCED else 0.0
        return f"its errors are {math.sqrt(excess):.3g} times what rounding makes" if excess > EXCESS else None


def visible(attention: nn.Module, positions: Tensor, keys: int) -> Tensor:
    """Which key each query may look at: those up to itself, and within its window where it has one."""
    places = torch.arange(keys).unsqueeze(0)
    seen = places <= positions.unsqueeze(1)
    own = vars(attention)
    window = own["sliding_window"] if "sliding_window" in own else getattr(own.get("config"), "sliding_window", None)
    return seen if not window else seen & (places > positions.unsqueeze(1) - int(window))


def _rows(x: Tensor) -> Tensor:
    """(1, heads, tokens, size) as (tokens, heads·size)."""
    return x[0].transpose(0, 1).flatten(1)

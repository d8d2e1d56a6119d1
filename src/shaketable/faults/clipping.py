"""Clipping: values too small to be represented vanish, values too large are cut.

The threshold is a fraction of a maximum over the whole tensor (`tensor`), the last dimension (`token`) or 32 values of it
(`block`). The choice decides everything: 0.01 of the tensor's maximum zeroes 99.9 % of a middle layer, because a few
activations are massive.

The gradient is that of what is computed with the maximum held fixed: zero where the value was zeroed or cut, one
elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from shaketable.faults.base import Magnitude, MagnitudeFault
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.noise import wide
from shaketable.faults.sums import usable_mask

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.rng import Draw

Scope = Literal["tensor", "token", "block"]


def split_blocks(x: Tensor, block: int) -> Tensor:
    """(…, n) to (…, ceil(n / block), block); each row is filled up with zeros, so that no block straddles two."""
    from torch.nn.functional import pad

    short = -x.shape[-1] % block
    padded = pad(x, (0, short)) if short else x
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // block, block)


def join_blocks(blocks: Tensor, length: int) -> Tensor:
    """The inverse of `split_blocks`."""
    return blocks.flatten(-2)[..., :length]


def top(x: Tensor, scope: Scope, block: int) -> Tensor:
    """The largest finite magnitude over the scope, broadcastable to `x`, in the type arithmetic is done in."""
    fast = gpu.top(x.detach(), finite=True) if scope == "tensor" or x.dim() == 0 else None
    if fast is not None:
        return fast
    a = wide(x.detach()).abs()
    a = a.where(a.isfinite(), 0.0)
    if a.numel() == 0:
        return a.sum()
    if scope == "tensor" or x.dim() == 0:
        return a.max()
    if scope == "token":
        return a.amax(-1, keepdim=True)
    parts = split_blocks(a, min(block, x.shape[-1]))
    return join_blocks(parts.amax(-1, keepdim=True).expand_as(parts), x.shape[-1])


class _Clipping(MagnitudeFault):
    """A fault whose threshold is `magnitude` times a maximum. Values beyond it have no gradient."""

    saves_input: ClassVar[bool] = True
    scope: Scope | Literal["absolute"] = "tensor"
    """What the maximum is taken over; with `absolute`, which `saturation` alone has, the magnitude itself is the threshold."""
    block: int = Field(default=32, ge=1, lt=2**31)
    """Values that share one maximum when the scope is `block`."""

    @property
    def tells(self) -> Literal["values", "rows", "whole"]:
        return "whole" if self.scope == "tensor" else "rows"

    def _unit(self, x: Tensor) -> Tensor | float:
        return 1.0 if self.scope == "absolute" else top(x, self.scope, self.block)

    def _clipped(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _is_beyond(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        fast = gpu.clipped(x, self.kind, self.magnitude, self.scope, self.block)
        return fast if fast is not None else self._clipped(x)

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        assert x is not None
        fast = gpu.clipped(x, self.kind, self.magnitude, self.scope, self.block, g)
        return fast if fast is not None else g.masked_fill(self._is_beyond(x), 0.0)


class DeadZone(_Clipping):
    """0 where |y| < magnitude·max|y|: the underflow of a format with too little range."""

    kind: Literal["dead_zone"] = "dead_zone"
    magnitude: Magnitude = Field(le=1)
    scope: Scope = "tensor"

    def _is_beyond(self, x: Tensor) -> Tensor:
        return wide(x).abs() < self._unit(x) * self.magnitude

    def _clipped(self, x: Tensor) -> Tensor:
        return x.masked_fill(self._is_beyond(x), 0.0)

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        """The largest zeroed value as a fraction of its maximum: just under the threshold."""
        zeroed = usable_mask(clean, faulty, lanes) & (faulty == 0) & (clean != 0)
        part = (wide(clean).abs() / self._unit(clean)).where(zeroed, -1.0).amax()
        return part.where(part >= 0, math.nan)


class Saturation(_Clipping):
    """Clamp to ±magnitude·max|y|, or to ±ceiling where an absolute ceiling is given."""

    kind: Literal["saturation"] = "saturation"

    def _is_beyond(self, x: Tensor) -> Tensor:
        return wide(x).abs() > self._unit(x) * self.magnitude

    def _clipped(self, x: Tensor) -> Tensor:
        w, ceiling = wide(x), self._unit(x) * self.magnitude
        return w.where(w <= ceiling, ceiling).where(w >= -ceiling, -ceiling).where(~w.isnan(), w).to(x.dtype)

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        cut = usable_mask(clean, faulty, lanes) & (clean != faulty)
        return (wide(faulty).abs() / self._unit(clean)).where(cut, math.nan).nanmedian()

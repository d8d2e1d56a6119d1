"""Bits: spikes, flips, stuck and missing bits of the tensor's own representation.

The gradient is straight-through, as for every rounding, except for `spike`, which scales a value and so scales its
gradient. Mantissa bits are counted from the top: bit 1 is the highest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from shaketable.faults.base import Magnitude, MagnitudeFault
from shaketable.faults.clipping import top
from shaketable.faults.noise import wide
from shaketable.faults.sums import usable_mask

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.rng import Draw

Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def mantissa_bits(x: Tensor) -> int:
    """Stored mantissa bits of the tensor's type: 23, 10 or 7 (52 for float64)."""
    import torch

    return {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.float64: 52}[x.dtype]


def as_integers(x: Tensor) -> Tensor:
    """The representation of a floating tensor, bit for bit."""
    import torch

    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.dtype.itemsize])


def everywhere(x: Tensor, lanes: Tensor | None) -> Tensor:
    """The faulty lanes as a mask of the whole tensor."""
    import torch

    every = torch.ones_like(x, dtype=torch.bool)
    return every if lanes is None else every & lanes


def bits_set(x: Tensor) -> Tensor:
    """Which mantissa bits are set: the highest first, one copy of the tensor's shape for each."""
    import torch

    raw, bits = as_integers(x), mantissa_bits(x)
    return torch.stack([(raw >> (bits - m)) & 1 for m in range(1, bits + 1)]).bool()


class Spike(MagnitudeFault):
    """With probability `rate`, y·magnitude (`mode=scale`) or ±magnitude·max|y| with the sign of y (`mode=max`)."""

    kind: Literal["spike"] = "spike"
    random: ClassVar[bool] = True
    rate: Rate = 1e-4
    """Probability of a spike, per value and call."""
    mode: Literal["scale", "max"] = "scale"

    def _hit(self, x: Tensor, draw: Draw) -> Tensor:
        return draw.uniform(x) < self.rate

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        w = wide(x)
        loud = w * self.magnitude
        if self.mode == "max":
            loud = (self.magnitude * top(x, "tensor", 1)).expand_as(w).copysign(w)
        return w.where(~self._hit(x, draw), loud).to(x.dtype)

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        if self.mode == "max":
            return g.masked_fill(self._hit(g, draw), 0.0)
        return self.apply(g, draw)

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        hit = usable_mask(clean, faulty, lanes) & (clean != faulty) & (clean != 0)
        unit = top(clean, "tensor", 1) if self.mode == "max" else wide(clean).abs()
        return (wide(faulty).abs() / unit).where(hit, math.nan).nanmedian()


class BitFlip(MagnitudeFault):
    """With probability `magnitude`, flip bit `bit` of the value (0 is the lowest); a random bit when none is named."""

    kind: Literal["bit_flip"] = "bit_flip"
    random: ClassVar[bool] = True
    magnitude: Magnitude = Field(le=1)
    bit: int | None = Field(default=None, ge=0, le=63)

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        raw = as_integers(x)
        width = 8 * x.dtype.itemsize
        if self.bit is not None and self.bit >= width:
            raise ValueError(f"bit_flip: bit {self.bit} does not exist in {x.dtype}, which has bits 0-{width - 1}")
        which = (draw.uniform(x, stream=1) * width).to(raw.dtype) if self.bit is None else self.bit
        flipped = raw ^ (raw.new_ones(()) << which)
        return raw.where(draw.uniform(x) >= self.magnitude, flipped).view(x.dtype)

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        flipped, seen = as_integers(clean) != as_integers(faulty), everywhere(clean, lanes)
        return (flipped & seen).sum().double() / seen.sum()


class _MantissaFault(MagnitudeFault):
    """A fault whose magnitude is a whole number of mantissa bits."""

    alike: ClassVar[bool] = True
    magnitude: Magnitude = Field(le=52)

    @field_validator("magnitude")
    @classmethod
    def _is_whole(cls, value: float) -> float:
        if value != int(value):
            raise ValueError("the magnitude counts mantissa bits: a whole number")
        return value

    def _from_bottom(self, x: Tensor) -> int:
        """Mantissa bits below the one the magnitude names."""
        return max(0, mantissa_bits(x) - int(self.magnitude))

    def _finite_only(self, x: Tensor, raw: Tensor) -> Tensor:
        return raw.view(x.dtype).where(x.isfinite(), x)


class StuckBit(_MantissaFault):
    """Mantissa bit `magnitude` (1 is the highest) always reads 1."""

    kind: Literal["stuck_bit"] = "stuck_bit"

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if self.magnitude > mantissa_bits(x):
            raise ValueError(f"stuck_bit: {x.dtype} has {mantissa_bits(x)} mantissa bits, not {int(self.magnitude)}")
        return self._finite_only(x, as_integers(x) | (1 << self._from_bottom(x)))

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        """The highest mantissa bit that is set in every value."""
        stuck = ~(~bits_set(faulty) & everywhere(faulty, lanes)).flatten(1).any(1)
        return (stuck.int().argmax().double() + 1).where(stuck.any(), math.nan)


class Truncation(_MantissaFault):
    """Keep the `magnitude` highest mantissa bits, drop the rest toward zero."""

    kind: Literal["truncation"] = "truncation"

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        return self._finite_only(x, as_integers(x) & ~((1 << self._from_bottom(x)) - 1))

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        """The lowest mantissa bit that is set anywhere, counted from the top."""
        used = (bits_set(faulty) & everywhere(faulty, lanes)).flatten(1).any(1)
        return (len(used) - used.flip(0).int().argmax()).double().where(used.any(), 0.0)

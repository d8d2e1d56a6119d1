"""Number formats: quantize and dequantize, with a straight-through gradient.

| | block | scale | grid |
|---|---|---|---|
| mxfp4 | 32 | E8M0: 2^(floor(log2 max) − 2), exponent clamped to ±127 | e2m1: 0 .5 1 1.5 2 3 4 6 |
| nvfp4 | 16, and one FP32 scale g = amax / (448·6) per tensor | E4M3 of max / 6 / g, at least 2^-6 | e2m1 |
| fp8_e4m3 | `scope`: tensor, token, block of 128, or none | amax / 448 | e4m3, largest 448 |
| fp8_e5m2 | the same | amax / 57344 | e5m2, largest 57344 |

Blocks run along the last dimension, which is the contraction dimension of an activation and of a Linear's weight;
a row that a block does not divide is padded with zeros, never joined with the next row. Rounding is to nearest, ties
to the even code; `rounding=stochastic` rounds up with the probability of the remainder. Casts saturate (torch's and
ml_dtypes' own casts of out-of-range values disagree, so nothing is left to them). A NaN makes its scale NaN: the block
(MXFP4), or the tensor (NVFP4, FP8 with one scale).

Where the oracles disagree, see docs/plans.md: torchao divides MXFP4 blocks whose scale is the subnormal 2^-127 by
2^-126, the OCP text and we do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from shaketable.faults.base import FaultBase
from shaketable.faults.clipping import Scope, join_blocks, split_blocks
from shaketable.faults.cpu import native
from shaketable.faults.gpu import dispatch as gpu

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.rng import Draw

E4M3_MAX, E5M2_MAX, E2M1_MAX, E4M3_TINY = 448.0, 57344.0, 6.0, 2.0**-6
TINY, HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest finite float32: scales and their inverses stay between them."""


def over(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded: an accelerator multiplies by the inverse of a plain number."""
    return x / x.new_full((), number)


def round_to_step(x: Tensor, step: Tensor, noise: Tensor | None) -> Tensor:
    """x to a multiple of `step` (a power of two): to nearest even, or up with the probability of the remainder."""
    scaled = x / step
    if noise is None:
        return scaled.round() * step
    low = scaled.floor()
    return (low + (noise < scaled - low)) * step


def to_grid(x: Tensor, mantissa: int, smallest: int, largest: float, noise: Tensor | None = None) -> Tensor:
    """Round float32 to a small float: `mantissa` bits, smallest normal exponent `smallest`, saturating at `largest`."""
    import torch

    a = x.abs().clamp_max(largest)
    exponent = torch.frexp(a).exponent - 1
    step = torch.exp2((exponent.clamp_min(smallest) - mantissa).float())
    rounded = round_to_step(a, step, noise).clamp_max(largest).copysign(x)
    return rounded.where(~x.isnan(), x)


def to_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """The FP4 grid."""
    return to_grid(x, mantissa=1, smallest=0, largest=E2M1_MAX, noise=noise)


def to_e4m3(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """The FP8 grid with more precision."""
    return to_grid(x, mantissa=3, smallest=-6, largest=E4M3_MAX, noise=noise)


def to_e5m2(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """The FP8 grid with more range."""
    return to_grid(x, mantissa=2, smallest=-14, largest=E5M2_MAX, noise=noise)


class Format(FaultBase):
    """A number format: acts on weights and inputs, because that is what a unit with that format reads."""

    points: ClassVar[tuple[str, ...]] = ("weight", "input")
    alike: ClassVar[bool] = True
    rounding: Literal["even", "stochastic"] = "even"

    @property
    def is_steady(self) -> bool:
        return self.rounding == "even"

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        fast = gpu.coded(x, self.kind, self._sharing(), draw.key if self.rounding == "stochastic" else None)
        if fast is not None:
            return fast
        return self._coded(x, draw) if x.dim() else self._coded(x.unsqueeze(0), draw).squeeze(0)

    def _coded(self, x: Tensor, draw: Draw) -> Tensor:
        """`x` as the format holds it: at least one dimension and one value."""
        raise NotImplementedError

    def _sharing(self) -> str:
        """What shares one scale."""
        return "block"

    def _noise(self, x: Tensor, draw: Draw) -> Tensor | None:
        return draw.uniform(x) if self.rounding == "stochastic" else None


class MXFP4(Format):
    """OCP microscaling FP4: blocks of 32 that share a power of two."""

    kind: Literal["mxfp4"] = "mxfp4"

    def _coded(self, x: Tensor, draw: Draw) -> Tensor:
        fast = native.mxfp4(x) if self.rounding == "even" else None
        return fast if fast is not None else self._plain(x, draw).to(x.dtype)

    def _plain(self, x: Tensor, draw: Draw) -> Tensor:
        import torch

        blocks = split_blocks(x.float(), 32)
        highest = blocks.abs().amax(-1, keepdim=True)
        exponent = ((highest.view(torch.int32) >> 23) - 129).clamp_min(-127)
        scale = power_of_two(exponent).where(~highest.isnan(), highest)
        scaled = blocks * power_of_two(-exponent)
        return join_blocks(to_e2m1(scaled, self._noise(scaled, draw)) * scale, x.shape[-1])


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for integers in ±127, exactly, the subnormal 2^-127 included."""
    import torch

    normal = ((exponent + 127) << 23).view(torch.float32)
    return normal.where(exponent > -127, torch.tensor(2.0**-127, device=exponent.device))


class NVFP4(Format):
    """NVIDIA FP4: blocks of 16 with an E4M3 scale, and one FP32 scale for the tensor."""

    kind: Literal["nvfp4"] = "nvfp4"

    def _coded(self, x: Tensor, draw: Draw) -> Tensor:
        w = x.float()
        whole = over(w.abs().amax(), E4M3_MAX * E2M1_MAX).clamp_min(TINY)
        blocks = split_blocks(w, 16)
        share = over(blocks.abs().amax(-1, keepdim=True), E2M1_MAX) / whole
        scale = to_e4m3(share.clamp(E4M3_TINY, E4M3_MAX))
        scaled = (blocks * ((1.0 / whole) / scale).clamp_max(HUGE)).clamp(-E2M1_MAX, E2M1_MAX)
        coded = to_e2m1(scaled, self._noise(scaled, draw)) * (whole * scale)
        return join_blocks(coded, x.shape[-1]).to(x.dtype)


class _FP8(Format):
    scope: Scope | Literal["none"] = "tensor"
    """What shares one scale; `none` casts without scaling."""
    largest: ClassVar[float]

    @staticmethod
    def cast(x: Tensor, noise: Tensor | None) -> Tensor:
        """Each value as the format holds it."""
        raise NotImplementedError

    def _sharing(self) -> str:
        return self.scope

    def _coded(self, x: Tensor, draw: Draw) -> Tensor:
        w = x.float()
        parts = split_blocks(w, 128) if self.scope == "block" else w
        scale = self._scale(parts)
        coded = self.cast(parts / scale, self._noise(parts, draw)) * scale
        return (join_blocks(coded, x.shape[-1]) if self.scope == "block" else coded).to(x.dtype)

    def _scale(self, parts: Tensor) -> Tensor:
        if self.scope == "none":
            return parts.new_ones(())
        a = parts.abs()
        highest = a.amax() if self.scope == "tensor" else a.amax(-1, keepdim=True)
        scale = over(highest, self.largest)
        return scale.where(scale != 0, 1.0)


class FP8E4M3(_FP8):
    """FP8 with 3 mantissa bits, largest 448, no infinity."""

    kind: Literal["fp8_e4m3"] = "fp8_e4m3"
    largest: ClassVar[float] = E4M3_MAX
    cast = staticmethod(to_e4m3)


class FP8E5M2(_FP8):
    """FP8 with 2 mantissa bits, largest 57344."""

    kind: Literal["fp8_e5m2"] = "fp8_e5m2"
    largest: ClassVar[float] = E5M2_MAX
    cast = staticmethod(to_e5m2)

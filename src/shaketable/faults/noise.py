"""Noise, bias and gain: faults that add something to every value or scale it.

Arithmetic is done in float32 (float64 for float64 tensors) and rounded once to the tensor's own type. z is a standard normal
keyed per element (see `rng.py`). The kernels of a GPU (`gpu`) and of a CPU (`native`) are tested against the formulas here.

Gradients are those of the formula with every statistic (a standard deviation, a maximum) held fixed. Relative noise is linear
in x, so its gradient has the same z, drawn again from the same key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from shaketable.faults.base import MagnitudeFault
from shaketable.faults.cpu import native
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.sums import CROSS, DEVIATION, ERROR, FINITE, NONZERO, RATIO, SQUARE, usable_mask

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.rng import Draw


def wide(x: Tensor) -> Tensor:
    """The tensor in the type that arithmetic is done in."""
    return x if x.dtype.itemsize >= 4 else x.float()


def middle(x: Tensor) -> Tensor:
    """Mean of the finite values, as a zero-dimensional tensor."""
    fast = gpu.moment(x, gpu.MEAN)
    return _mean(wide(x), x) if fast is None else fast


def spread(x: Tensor) -> Tensor:
    """Standard deviation of the finite values, as a zero-dimensional tensor."""
    fast = gpu.moment(x, gpu.SPREAD)
    return _mean((wide(x) - middle(wide(x))).square(), x).sqrt() if fast is None else fast


def size(x: Tensor) -> Tensor:
    """Root mean square of the finite values, as a zero-dimensional tensor."""
    fast = gpu.moment(x, gpu.SIZE)
    return _mean(wide(x).square(), x).sqrt() if fast is None else fast


def _mean(w: Tensor, x: Tensor) -> Tensor:
    """The mean of w where x is finite, summed in memory order whatever the layout."""
    finite = x.isfinite().contiguous()
    return w.contiguous().where(finite, 0.0).sum() / finite.sum().clamp_min(1)


def in_units(x: Tensor, draw: Draw, factor: float, unit: Tensor) -> Tensor:
    """x + z·factor·unit, for a unit that is a number on the device."""
    fast = gpu.noise(x, factor, draw.key, relative=False, unit=unit)
    return fast if fast is not None else (wide(x) + draw.normal(x) * (factor * unit)).to(x.dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    fast = gpu.shift(x, factor, gpu.GAIN)
    return fast if fast is not None else (wide(x) * factor).to(x.dtype)


def deviation(clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> Tensor:
    """Root mean square of faulty − clean where it can be told, as one float64 number; 0 of nothing."""
    seen = usable_mask(clean, faulty, lanes)
    error = (faulty.double() - clean.double()).where(seen, 0.0)
    return (error.square().sum() / seen.sum().clamp_min(1)).sqrt()


def rms(x: Tensor) -> float:
    """Root mean square, in float64; 0 of nothing."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def at_least(x: Tensor) -> Tensor:
    """A number that can be divided by."""
    return x.double().clamp_min(1e-300)


def _by_kernel(x: Tensor, magnitude: float, draw: Draw, *, relative: bool) -> Tensor | None:
    """The noisy tensor, by a GPU's kernel or the C++; None where neither is."""
    fast = gpu.noise(x, magnitude, draw.key, relative=relative)
    return native.add_noise(x, magnitude, draw.normal_key, relative=relative) if fast is None else fast


class RelativeGaussian(MagnitudeFault):
    """y + |y|·z·magnitude: each value is off by a random fraction of itself."""

    kind: Literal["relative_gaussian"] = "relative_gaussian"
    alike: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        fast = _by_kernel(x, self.magnitude, draw, relative=True)
        if fast is not None:
            return fast
        w = wide(x)
        return (w + w * (draw.normal(x) * self.magnitude)).to(x.dtype)

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        return self.apply(g, draw)

    def magnitude_of(self, sums: Tensor) -> Tensor | None:
        return (sums[RATIO] / sums[NONZERO]).sqrt()


class AbsoluteGaussian(MagnitudeFault):
    """y + z·magnitude: fixed-point noise."""

    kind: Literal["absolute_gaussian"] = "absolute_gaussian"
    alike: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        fast = _by_kernel(x, self.magnitude, draw, relative=False)
        return (wide(x) + draw.normal(x) * self.magnitude).to(x.dtype) if fast is None else fast

    def magnitude_of(self, sums: Tensor) -> Tensor | None:
        return (sums[ERROR] / sums[FINITE]).sqrt()


class _NoiseInUnits(MagnitudeFault):
    """y + z·magnitude·unit(y), for a unit that is one number of the tensor."""

    random: ClassVar[bool] = True

    @staticmethod
    def unit(x: Tensor) -> Tensor:
        raise NotImplementedError

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        return in_units(x, draw, self.magnitude, self.unit(x))

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        return deviation(clean, faulty, lanes) / at_least(self.unit(clean))


class Noise(_NoiseInUnits):
    """y + z·magnitude·std(y): noise in units of the tensor's own spread."""

    kind: Literal["noise"] = "noise"
    unit = staticmethod(spread)


class RMSGaussian(_NoiseInUnits):
    """y + z·magnitude·rms(y): noise in units of the tensor's own size; what AQN adds to the weight of a norm."""

    kind: Literal["rms_gaussian"] = "rms_gaussian"
    unit = staticmethod(size)


class SystematicBias(MagnitudeFault):
    """y + sign(y)·magnitude: a rounding bias away from zero."""

    kind: Literal["systematic_bias"] = "systematic_bias"
    alike: ClassVar[bool] = True

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        fast = gpu.shift(x, self.magnitude, gpu.SYSTEMATIC)
        if fast is not None:
            return fast
        w = wide(x)
        return (w + w.sign() * self.magnitude).to(x.dtype)

    def magnitude_of(self, sums: Tensor) -> Tensor | None:
        return sums[DEVIATION] / sums[NONZERO]


class Bias(MagnitudeFault):
    """y + magnitude·s on the faulty channels, where s is the standard deviation seen at first use."""

    kind: Literal["bias"] = "bias"

    def reference(self, x: Tensor) -> Tensor | None:
        return spread(x.detach())

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        unit = (draw.reference if draw.reference is not None else spread(x)).to(x.device)
        fast = gpu.shift(x, self.magnitude, gpu.BIAS, unit=unit) if unit.dtype.itemsize == 4 else None
        return fast if fast is not None else (wide(x) + self.magnitude * unit).to(x.dtype)

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        seen = usable_mask(clean, faulty, lanes)
        off = (faulty.double() - clean.double()).where(seen, 0.0).sum() / seen.sum()
        return off / at_least(spread(clean))


class Gain(MagnitudeFault):
    """y·(1 + magnitude)."""

    kind: Literal["gain"] = "gain"
    alike: ClassVar[bool] = True

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        return scaled(x, 1.0 + self.magnitude)

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        return self.apply(g, draw)

    def magnitude_of(self, sums: Tensor) -> Tensor | None:
        return sums[CROSS] / sums[SQUARE]


class NonDeterminism(MagnitudeFault):
    """The same input gives another output at every call; `magnitude` is the variance factor v ≥ 1.

    `inconsistent` adds noise so that the variance grows v-fold; `amplified` scales the deviations from the mean so
    that the variance grows by a factor drawn once per call from [1, v].
    """

    kind: Literal["non_determinism"] = "non_determinism"
    random: ClassVar[bool] = True
    mode: Literal["amplified", "inconsistent"] = "inconsistent"

    @field_validator("magnitude")
    @classmethod
    def _is_a_variance_factor(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError("non_determinism's magnitude is a variance factor: 0 (off) or at least 1")
        return value

    @property
    def is_off(self) -> bool:
        return self.magnitude in (0, 1)

    def _factor(self, draw: Draw) -> float:
        return math.sqrt(1.0 + draw.number() * (self.magnitude - 1.0))

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        if self.mode == "inconsistent":
            return in_units(x, draw, math.sqrt(self.magnitude - 1.0), spread(x))
        w, mean = wide(x), middle(x)
        return (mean + (w - mean) * self._factor(draw)).to(x.dtype)

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        return g if self.mode == "inconsistent" else scaled(g, self._factor(draw))

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        if self.mode == "inconsistent":
            return 1.0 + (deviation(clean, faulty, lanes) / at_least(spread(clean))) ** 2
        seen, mean = usable_mask(clean, faulty, lanes), middle(clean).double()
        after, before = ((x.double() - mean).where(seen, 0.0).square().sum() for x in (faulty, clean))
        return 2.0 * (after / before) - 1.0

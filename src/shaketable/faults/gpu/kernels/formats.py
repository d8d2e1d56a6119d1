"""Triton: number formats in one pass; maximum, scale, rounding and the way back stay in registers.

Bit for bit what `gpu/formats.py` computes, with fewer instructions where they give the same bits:

* To nearest even: adding and taking away 1.5·2^23 steps rounds to a multiple of the step, for the sum has no bits below it. The
  step is a power of two, made from the exponent's own bits; no division, no logarithm.
* Divisions are by `div_rn`: Triton's `/` is an approximation on a GPU.
* A value at or under the largest of a grid is not rounded past it, so it is cut once, before.

Whether NaN is handed on is said at every minimum: a GPU's own drop it. Rejected: the GPU's conversions to FP8 and FP4. They
are on some GPUs only, round to nearest only, and saturate in ways of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.noise import first_hash, joined, mix64
from shaketable.faults.gpu.kernels.tiles import (
    INFINITY,
    fetch,
    held,
    highest,
    magnitude_bits,
    own_bits,
    place,
    put,
    rounded,
    widened,
)

MXFP4, NVFP4, E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NONE, WHOLE, PARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KEEP = tl.constexpr(tl.PropagateNan.ALL)
SIGN = tl.constexpr(-(2**31))
TINY, HUGE = tl.constexpr(2.0**-126), tl.constexpr((2 - 2.0**-23) * 2.0**127)


@triton.jit
def to_grid(a, u, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`to_grid` of gpu/formats.py for magnitudes; `u` are uniforms, looked at when rounding is stochastic."""
    a = tl.minimum(a, LARGEST, propagate_nan=KEEP)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & INFINITY, (SMALLEST + 127) << 23)
    if STOCHASTIC:
        step = exponent - (MANTISSA << 23)
        scaled = a * ((254 << 23) - step).to(tl.float32, bitcast=True)
        low = tl.floor(scaled)
        return (low + tl.where(u < scaled - low, 1.0, 0.0)) * step.to(tl.float32, bitcast=True)
    power, heavy = exponent.to(tl.float32, bitcast=True), 1.5 * 2.0 ** (23 - MANTISSA)
    return tl.fma(power, -heavy, tl.fma(power, heavy, a))


@triton.jit
def signed(y, w):
    """The magnitude `y` with the sign of `w`."""
    return (y.to(tl.int32, bitcast=True) | (w.to(tl.int32, bitcast=True) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """The bits of 2^exponent for integers in ±127, the subnormal 2^-127 included."""
    return tl.where(exponent > -127, (exponent + 127) << 23, 0x00400000)


@triton.jit
def uniforms(number, low, high):
    """`Draw.uniform` of the values with these numbers."""
    key = mix64(joined(low, high))
    h = first_hash(number.to(tl.uint32), key.to(tl.uint32), (key >> 32).to(tl.uint32))
    return (h >> 8).to(tl.int32, bitcast=True).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def scales(top, whole, KIND: tl.constexpr):
    """What a segment is multiplied by (FP4) or divided by (FP8), and multiplied by on its way back.

    Args:
        top: The bits of the segment's largest magnitude.
        whole: The tensor's largest magnitude (NVFP4).
        KIND: The format.
    """
    if KIND == MXFP4:
        exponent = tl.maximum((top >> 23) - 129, -127)
        back = tl.where(top > INFINITY, top, power_of_two(exponent)).to(tl.float32, bitcast=True)
        return power_of_two(-exponent).to(tl.float32, bitcast=True), back
    high = top.to(tl.float32, bitcast=True)
    if KIND == NVFP4:
        unit = tl.maximum(tl.div_rn(whole, 2688.0), TINY, propagate_nan=KEEP)
        share = tl.maximum(tl.div_rn(tl.div_rn(high, 6.0), unit), 0.015625, propagate_nan=KEEP)
        scale = to_grid(share, share, 3, -6, 448.0, False)
        there = tl.minimum(tl.div_rn(tl.div_rn(1.0, unit), scale), HUGE, propagate_nan=KEEP)
        return there, unit * scale
    scale = tl.div_rn(high, 448.0 if KIND == E4M3 else 57344.0)
    scale = tl.where(scale != 0.0, scale, 1.0)
    return scale, scale


@triton.jit
def shared(top, whole, KIND: tl.constexpr, SCOPE: tl.constexpr):
    """The scales that a tile needs: of its segments, of the whole tensor, or none."""
    if SCOPE == PARTS:
        there, back = scales(top, whole, KIND)
    elif SCOPE == WHOLE:
        there, back = scales(whole.to(tl.int32, bitcast=True), whole, KIND)
    else:
        there, back = 1.0, 1.0
    return there, back


@triton.jit
def coded(
    value, there, back, number, low, high,
    KIND: tl.constexpr, SCOPE: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A tile as the format holds it, in the tensor's own type."""
    w = widened(value, FAST)
    u = uniforms(number, low, high) if STOCHASTIC else w
    a = tl.abs(w)
    if KIND <= NVFP4:
        y = to_grid(a * there, u, 1, 0, 6.0, STOCHASTIC)
    else:
        if SCOPE != NONE:
            a = tl.div_rn(a, there)
        if KIND == E4M3:
            y = to_grid(a, u, 3, -6, 448.0, STOCHASTIC)
        else:
            y = to_grid(a, u, 2, -14, 57344.0, STOCHASTIC)
    return rounded(signed(y if SCOPE == NONE else y * back, w), value.dtype, FAST)


@triton.jit(do_not_specialize=["cols", "per_row", "count", "low", "high"])
def quantize(
    x, y, whole, cols, per_row, count, low, high,
    KIND: tl.constexpr, SCOPE: tl.constexpr, STOCHASTIC: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Quantize and dequantize. `whole`: the tensor's largest magnitude, where it is asked for; the rest: `gpu/tiling.py`."""
    peak = tl.load(whole) if SCOPE == WHOLE or KIND == NVFP4 else 0.0
    if STEPS > 0:
        values = held(x, cols, per_row, count, LENGTH, WIDTH, STEPS, GROUP, RAGGED, ALIGNED, EVEN)
        top = peak
        if SCOPE == PARTS:
            bits = own_bits(values[0], False)
            for i in tl.static_range(1, STEPS):
                bits = tl.maximum(bits, own_bits(values[i], False))
            top = highest(bits, x.dtype.element_ty, FAST)
        there, back = shared(top, peak, KIND, SCOPE)
        for i in tl.static_range(STEPS):
            offset, inside, number = place(i * WIDTH, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            result = coded(values[i], there, back, number, low, high, KIND, SCOPE, STOCHASTIC, FAST)
            put(y, offset, result, inside, EVEN and (i + 1) * WIDTH <= LENGTH)
    else:
        full: tl.constexpr = EVEN and LENGTH % WIDTH == 0
        bits = tl.zeros((GROUP, WIDTH), tl.int32)
        for start in range(0, LENGTH, WIDTH):
            offset, inside, number = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            bits = tl.maximum(bits, magnitude_bits(widened(fetch(x, offset, inside, full), FAST)))
        there, back = shared(tl.max(bits, axis=1)[:, None], peak, KIND, SCOPE)
        for start in range(0, LENGTH, WIDTH):
            offset, inside, number = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            value = fetch(x, offset, inside, full)
            put(y, offset, coded(value, there, back, number, low, high, KIND, SCOPE, STOCHASTIC, FAST), inside, full)

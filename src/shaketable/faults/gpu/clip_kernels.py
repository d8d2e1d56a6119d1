"""Triton: what is too small vanishes, what is too large is cut, and their gradients, in one pass each.

Bit for bit what `clipping.py` computes. The gradient looks at the clean value again and finds the same threshold, instead of
keeping a mask in memory: a mask is one more tensor to write, to keep and to read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.noise_kernels import rounded, widened
from shaketable.faults.gpu.tiles import fetch, finite_bits, place, put

DEAD_ZONE, SATURATION = tl.constexpr(0), tl.constexpr(1)
ABSOLUTE, WHOLE, PARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def clipped(value, edge, KIND: tl.constexpr, FAST: tl.constexpr):
    """A tile and its threshold or ceiling. A NaN is neither small nor large."""
    w = widened(value, FAST)
    if KIND == DEAD_ZONE:
        return tl.where(tl.abs(w) < edge, tl.zeros_like(value), value)
    y = tl.where(w > edge, edge, tl.where(w < -1.0 * edge, -1.0 * edge, w))
    return rounded(y, value.dtype, FAST)


@triton.jit
def passed(g, value, edge, KIND: tl.constexpr, FAST: tl.constexpr):
    """The gradient: nothing through what was zeroed or cut."""
    a = tl.abs(widened(value, FAST))
    return tl.where(a < edge if KIND == DEAD_ZONE else a > edge, tl.zeros_like(g), g)


@triton.jit
def struck(
    x, g, y, offset, inside, value, edge,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write one tile."""
    if GRADIENT:
        put(y, offset, passed(fetch(g, offset, inside, EVEN), value, edge, KIND, FAST), inside, EVEN)
    else:
        put(y, offset, clipped(value, edge, KIND, FAST), inside, EVEN)


@triton.jit(do_not_specialize=["scale", "cols", "per_row", "count"])
def clip(
    x, g, y, whole, scale, cols, per_row, count,
    KIND: tl.constexpr, SCOPE: tl.constexpr, GRADIENT: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Dead zone or saturation. `whole`: the tensor's largest finite magnitude, where it is asked for; `g`: see `GRADIENT`."""
    edge = scale * tl.load(whole) if SCOPE == WHOLE else scale
    if LENGTH <= WIDTH:
        offset, inside, _ = place(0, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
        value = fetch(x, offset, inside, EVEN)
        if SCOPE == PARTS:
            edge = tl.max(finite_bits(widened(value, FAST)), axis=1)[:, None].to(tl.float32, bitcast=True) * scale
        struck(x, g, y, offset, inside, value, edge, KIND, GRADIENT, EVEN, FAST)
    else:
        top = tl.zeros((GROUP,), tl.int32)
        for start in range(0, LENGTH, WIDTH):
            offset, inside, _ = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            top = tl.maximum(top, tl.max(finite_bits(widened(fetch(x, offset, inside, EVEN), FAST)), axis=1))
        edges = top[:, None].to(tl.float32, bitcast=True) * scale
        for start in range(0, LENGTH, WIDTH):
            offset, inside, _ = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            struck(x, g, y, offset, inside, fetch(x, offset, inside, EVEN), edges, KIND, GRADIENT, EVEN, FAST)

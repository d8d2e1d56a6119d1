"""Triton: what is too small vanishes, what is too large is cut, and their gradients, in one pass each.

Bit for bit what `gpu/clipping.py` computes. The gradient looks at the clean value again and finds the same threshold, instead
of keeping a mask in memory: a mask is one more tensor to write, to keep and to read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.tiles import fetch, finite_bits, held, highest, own_bits, place, put, rounded, widened

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
def struck(value, g, edge, KIND: tl.constexpr, GRADIENT: tl.constexpr, FAST: tl.constexpr):
    """What is written of one tile."""
    return passed(g, value, edge, KIND, FAST) if GRADIENT else clipped(value, edge, KIND, FAST)


@triton.jit(do_not_specialize=["scale", "cols", "per_row", "count"])
def clip(
    x, g, y, whole, scale, cols, per_row, count,
    KIND: tl.constexpr, SCOPE: tl.constexpr, GRADIENT: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Dead zone or saturation. `whole`: the tensor's largest finite magnitude, where it is asked for; `g`: see `GRADIENT`."""
    edge = scale * tl.load(whole) if SCOPE == WHOLE else scale
    if STEPS > 0:
        values = held(x, cols, per_row, count, LENGTH, WIDTH, STEPS, GROUP, RAGGED, ALIGNED, EVEN)
        backs = held(g, cols, per_row, count, LENGTH, WIDTH, STEPS, GROUP, RAGGED, ALIGNED, EVEN) if GRADIENT else values
        if SCOPE == PARTS:
            bits = own_bits(values[0], True)
            for i in tl.static_range(1, STEPS):
                bits = tl.maximum(bits, own_bits(values[i], True))
            edge = highest(bits, x.dtype.element_ty, FAST).to(tl.float32, bitcast=True) * scale
        for i in tl.static_range(STEPS):
            offset, inside, _ = place(i * WIDTH, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            result = struck(values[i], backs[i], edge, KIND, GRADIENT, FAST)
            put(y, offset, result, inside, EVEN and (i + 1) * WIDTH <= LENGTH)
    else:
        full: tl.constexpr = EVEN and LENGTH % WIDTH == 0
        top = tl.zeros((GROUP, WIDTH), tl.int32)
        for start in range(0, LENGTH, WIDTH):
            offset, inside, _ = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            top = tl.maximum(top, finite_bits(widened(fetch(x, offset, inside, full), FAST)))
        edges = tl.max(top, axis=1)[:, None].to(tl.float32, bitcast=True) * scale
        for start in range(0, LENGTH, WIDTH):
            offset, inside, _ = place(start, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
            value = fetch(x, offset, inside, full)
            back = fetch(g, offset, inside, full) if GRADIENT else value
            put(y, offset, struck(value, back, edges, KIND, GRADIENT, FAST), inside, full)

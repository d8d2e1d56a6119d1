"""What the kernels that work on segments share: where a tile lies, and the largest magnitude in it.

Magnitudes are compared as integers: the bits of non-negative floats are in the order of their values, infinity above them all
and NaN above infinity. So a maximum of bits hands NaN on, as torch's `amax` does and a card's own float maximum does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(w):
    """The bits of |w| for float32, as int32."""
    return w.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_bits(w):
    """The same with 0 for what is not finite."""
    bits = magnitude_bits(w)
    return tl.where(bits < INFINITY, bits, 0)


@triton.jit
def place(
    start, cols, per_row, count,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Offsets of one step of a program's segments, which of them exist, and their numbers when all segments are filled up.

    A multiple of 16 is written as one, `ALIGNED`: so the compiler sees that it can load 16 bytes at once. (Triton would find
    out at every launch, for each argument; and make a constant of an argument that is 1, which then is no argument.)
    """
    s = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    lane = start + tl.arange(0, WIDTH)
    number = (s.to(tl.int64) * LENGTH)[:, None] + lane[None, :]
    inside = (s < count)[:, None] & (lane < LENGTH)[None, :]
    if RAGGED:
        if ALIGNED:
            cols = cols // 16 * 16
        row = s // per_row
        first = (s - row * per_row) * LENGTH
        offset = (row.to(tl.int64) * cols + first)[:, None] + lane[None, :]
        return offset, inside & (first[:, None] + lane[None, :] < cols), number
    return number, inside, number


@triton.jit
def fetch(x, offset, inside, EVEN: tl.constexpr):
    """A tile, with zeros where there is nothing."""
    if EVEN:
        return tl.load(x + offset)
    return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit
def put(y, offset, value, inside, EVEN: tl.constexpr):
    """Write a tile."""
    if EVEN:
        tl.store(y + offset, value)
    else:
        tl.store(y + offset, value, mask=inside)

"""What kernels share: how values are read, written and rounded, where a tile lies, and the largest magnitude in it.

Magnitudes are compared as integers: the bits of non-negative floats are in the order of their values, infinity above them all
and NaN above infinity. So a maximum of bits hands NaN on, as torch's `amax` does and a card's own float maximum does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def rounded(y, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """float32 to the tensor's own type, to nearest even; the interpreter cuts bfloat16 off and loses its subnormals."""
    if not FAST and tl.bfloat16 == DTYPE:
        bits = y.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(y == y, even, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y.to(DTYPE)


@triton.jit
def widened(x, FAST: tl.constexpr):
    """A tensor's own type to float32; the interpreter makes something else of bfloat16's subnormals."""
    if not FAST and tl.bfloat16 == x.dtype:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


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
def own_bits(value, FINITE: tl.constexpr):
    """The bits of magnitudes in a tensor's own type, as integers of its size; with `FINITE`, 0 for what is not finite."""
    if value.dtype == tl.float32:
        bits, infinity = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INFINITY
    else:
        bits, infinity = value.to(tl.int16, bitcast=True) & 0x7FFF, 0x7F80 if value.dtype == tl.bfloat16 else 0x7C00
    return tl.where(bits < infinity, bits, 0) if FINITE else bits


@triton.jit
def highest(bits, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """The largest of each segment's `own_bits`, as the bits of a float32."""
    top = tl.max(bits, axis=1)[:, None]
    if tl.float32 != DTYPE:
        top = widened(top.to(tl.int16).to(DTYPE, bitcast=True), FAST).to(tl.int32, bitcast=True)
    return top


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
def held(
    x, cols, per_row, count,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All tiles of a program's segments, each asked for before the first is looked at."""
    tiles = ()
    for i in tl.static_range(STEPS):
        offset, inside, _ = place(i * WIDTH, cols, per_row, count, LENGTH, WIDTH, GROUP, RAGGED, ALIGNED)
        tiles = tiles + (fetch(x, offset, inside, EVEN and (i + 1) * WIDTH <= LENGTH),)  # noqa: RUF005 (Triton does not unpack)
    return tiles


@triton.jit
def put(y, offset, value, inside, EVEN: tl.constexpr):
    """Write a tile."""
    if EVEN:
        tl.store(y + offset, value)
    else:
        tl.store(y + offset, value, mask=inside)

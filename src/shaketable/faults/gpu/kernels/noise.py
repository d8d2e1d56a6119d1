"""Triton: keyed normals fused with their use, one read and one write per value.

The hashes are those of `faults/rng.py`, bit for bit, so element i of a tensor under key k is struck by the same noise on every
device. What comes after them differs by rounding: a card's own logarithm, root, sine and cosine are a quarter of the
instructions of the written-out polynomials, which would make these kernels wait for arithmetic instead of for memory (measured
on an H200: 2.0 instead of 3.3 TB/s where a copy does 3.7). In Triton's interpreter (`FAST` false) the polynomials are used, and
the result has the bits of plain torch.

With `LIVE` the kernel reads the row of its tap: its key, its scale
and whether it is on come from the GPU's memory, where `begin_pass.py` puts them at the head of every pass and replay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.asm import asm
from shaketable.faults.gpu.kernels.measure import (
    ADDITIVE,
    ALL,
    BIAS,
    DUE,
    GAIN,
    PHASE,
    RELATIVE,
    SEEN,
    WIDTH,
    add_counts,
    add_measured,
    changes,
    counts,
    no_changes,
    no_counts,
)  # fmt: skip
from shaketable.faults.gpu.kernels.tiles import fetch, put, rounded, widened

STEP = tl.constexpr(256)
"""Values that a program looks at together when it measures."""
LOOK = tl.constexpr(32)


@triton.jit
def mix64(v):
    """SplitMix64's finalizer, as in `faults/rng.py`."""
    v = v + 0x9E3779B97F4A7C15
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB
    return v ^ (v >> 31)


@triton.jit
def joined(low, high):
    """A 64-bit key from two 32-bit arguments."""
    return low.to(tl.uint32, bitcast=True).to(tl.uint64) | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def first_hash(c, k0, k1):
    """The first 32-bit hash of a counter."""
    h = c ^ k0
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) + k1
    h = h * 0xD35A2D97
    h = (h ^ (h >> 15)) * 0x31848BAB
    return h ^ (h >> 16)


@triton.jit
def second_hash(h, c, k1):
    """The second one, from the first."""
    h = h + c * 0x9E3779B9 + k1
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def radius(u, FAST: tl.constexpr):
    """√(−2 ln u)."""
    if FAST:
        return asm("sqrt.approx.ftz.f32 $0, $1;", asm("lg2.approx.ftz.f32 $0, $1;", u) * -1.3862943611198906)
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    p = m * 7.0376836292e-2 + -1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m + -1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m + -1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m + -2.4999993993e-1
    p = p * m + 3.3333331174e-1
    m2 = m * m
    ln = (m + (m2 * m * p - 0.5 * m2)) + e.to(tl.float32) * 0.693147180559945
    return tl.sqrt_rn(tl.maximum(ln * -2.0, 0.0))


@triton.jit
def sine_cosine(t, FAST: tl.constexpr):
    """Of an angle in ±π/4."""
    if FAST:
        return asm("sin.approx.ftz.f32 $0, $1;", t), asm("cos.approx.ftz.f32 $0, $1;", t)
    t2 = t * t
    s = t * (1.0 + t2 * (-1.6666654611e-1 + t2 * (8.3321608736e-3 + t2 * -1.9515295891e-4)))
    q = 1.0 - 0.5 * t2 + t2 * t2 * (4.166664568e-2 + t2 * (-1.388731625e-3 + t2 * 2.443315711e-5))
    return s, q


@triton.jit
def normal_pair(c, k0, k1, FAST: tl.constexpr):
    """Two standard normals for each pair counter."""
    h1 = first_hash(c, k0, k1)
    h2 = second_hash(h1, c, k1)
    u = ((h1 >> 1).to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 4.656612873077393e-10
    r = radius(u, FAST)
    s, q = sine_cosine((h2 << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6571409e-10, FAST)
    swap = h2.to(tl.int32, bitcast=True) < 0
    a, b = r * tl.where(swap, s, q), r * tl.where(swap, q, s)
    return tl.where((h2 & 0x40000000) != 0, -a, a), tl.where((h1 & 1) != 0, -b, b)


@triton.jit
def normals(block, k0, k1, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """The standard normals of a block. The two of a pair lie side by side, in one thread."""
    a, b = normal_pair((tl.arange(0, BLOCK // 2) + block * (BLOCK // 2)).to(tl.uint32), k0, k1, FAST)
    return tl.interleave(a, b)


@triton.jit
def struck(x, z, scale, KIND: tl.constexpr, FAST: tl.constexpr):
    """A value and its normal, as in `faults/noise.py`, rounded once to the value's own type."""
    w = widened(x, FAST)
    if KIND == RELATIVE:
        y = w + w * (z * scale)
    else:
        y = w + z * scale
    return rounded(y, x.dtype, FAST)


@triton.jit
def shifted(x, scale, KIND: tl.constexpr, FAST: tl.constexpr):
    """What needs no noise: bias, gain and systematic bias."""
    w = widened(x, FAST)
    if KIND == BIAS:
        w = w + scale
    elif KIND == GAIN:
        w = w * scale
    else:
        w = w + tl.where(w > 0, scale, tl.where(w < 0, -scale, 0.0))
    return rounded(w, x.dtype, FAST)


@triton.jit
def write_block(
    x, y, block, n, scale, on, k0, k1,
    KIND: tl.constexpr, LIVE: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Strike one block; what was there, what is there now, and which of it exists."""
    i = block * tl.full((), BLOCK, tl.int64) + tl.arange(0, BLOCK)
    value = fetch(x, i, i < n, EVEN)
    if KIND <= ADDITIVE:
        result = struck(value, normals(block, k0, k1, FAST, BLOCK), scale, KIND, FAST)
    else:
        result = shifted(value, scale, KIND, FAST)
    if LIVE:
        result = tl.where(on != 0, result, value)
    put(y, i, result, i < n, EVEN)
    return value, result, i < n


@triton.jit
def write_live(
    x, y, n, scale, flags, k0, k1, sums,
    KIND: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program of a kernel that reads its row. The first one counts, and measures when that is due.

    As long as nothing has changed, programs all over the tensor look whether their block does: gradients of most tokens may be
    zero. In a large tensor that is every 32nd block and the last four, which a loss on the last token reaches.
    """
    block = tl.program_id(0)
    if (block == 0) & (flags != 0):
        tl.atomic_add(sums + (flags & PHASE) - 1, 1.0)
    last = tl.num_programs(0) - 1
    looks = (last < LOOK) | (block % LOOK == 0) | (block > last - 4)
    if ((block == 0) & ((flags & DUE) != 0)) | (((flags & ALL) != 0) & looks):
        error, size, over, under = no_changes(STEP)
        values, changed, alive, survived = no_counts(STEP)
        for step in range(BLOCK // STEP):
            at = block * (BLOCK // STEP) + step
            value, result, inside = write_block(x, y, at, n, scale, flags, k0, k1, KIND, True, FAST, EVEN, STEP)
            values, changed, alive, survived = counts(values, changed, alive, survived, value, result, inside, FAST)
            e, s, o, u = changes(value, result, inside, KIND, FAST)
            error, size, over, under = error + e, size + s, over + o, under + u
        if block == 0:
            add_counts(sums, values, changed, alive, survived)
            add_measured(sums, error, size, over, under, KIND)
        elif tl.sum(changed) > 0:
            tl.store(sums + SEEN, 1.0)
    else:
        write_block(x, y, block, n, scale, flags, k0, k1, KIND, True, FAST, EVEN, BLOCK)


@triton.jit(do_not_specialize=["n", "scale", "low", "high", "row", "place"])
def noise(
    x, y, n, scale, low, high, unit, rows, sums, row, place,
    KIND: tl.constexpr, UNIT: tl.constexpr, LIVE: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x + |x|·z·scale, or x + z·scale·unit."""
    if LIVE:
        rows += 4 * row
        k0, k1 = tl.load(rows).to(tl.uint32, bitcast=True), tl.load(rows + 1).to(tl.uint32, bitcast=True)
        scale, flags = tl.load(rows + 2).to(tl.float32, bitcast=True), tl.load(rows + 3)
    else:
        key = mix64(joined(low, high) ^ 0xD1CE)
        k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    if UNIT:
        scale = scale * tl.load(unit)
    if LIVE:
        write_live(x, y, n, scale, flags, k0, k1, sums + WIDTH * place, KIND, FAST, EVEN, BLOCK)
    else:
        write_block(x, y, tl.program_id(0), n, scale, 1, k0, k1, KIND, False, FAST, EVEN, BLOCK)


@triton.jit(do_not_specialize=["n", "scale", "row", "place"])
def arithmetic(
    x, y, n, scale, unit, rows, sums, row, place,
    KIND: tl.constexpr, LIVE: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bias, gain and systematic bias."""
    if LIVE:
        rows += 4 * row
        scale, flags = tl.load(rows + 2).to(tl.float32, bitcast=True), tl.load(rows + 3)
    if KIND == BIAS:
        scale = scale * tl.load(unit)
    if LIVE:
        write_live(x, y, n, scale, flags, 0, 0, sums + WIDTH * place, KIND, FAST, EVEN, BLOCK)
    else:
        write_block(x, y, tl.program_id(0), n, scale, 1, 0, 0, KIND, False, FAST, EVEN, BLOCK)

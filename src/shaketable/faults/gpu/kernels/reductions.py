"""Triton: the largest magnitude and the sums of a tensor, without atomics and without asking the host.

Each program of the first kernel folds its share of the tensor into one partial result; one program of the second folds those.
Who folds what depends on the number of values alone, so the same tensor gives the same bits every time, which float atomics
do not. A share is a power of two of blocks: few variants to compile, at most `PARTIALS` partial results.

Sums are in float64 over raw values, not over deviations from a first guess: one pass instead of two. Data whose spread is a
ten-thousandth of its mean still loses nothing that a float32 result could show.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.tiles import INFINITY, finite_bits, magnitude_bits, widened

PARTIALS = tl.constexpr(4096)


@triton.jit(do_not_specialize=["n"])
def tops(
    x, bits, n,
    FINITE: tl.constexpr, ALIGNED: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude in each program's share; `FINITE` overlooks what is not."""
    if ALIGNED:
        n = n // 16 * 16
    first = tl.program_id(0).to(tl.int64) * (SHARE * BLOCK)
    lane = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int32)
    for step in range(SHARE):
        i = first + step * BLOCK + lane
        w = widened(tl.load(x + i, mask=i < n, other=0.0), FAST)
        best = tl.maximum(best, finite_bits(w) if FINITE else magnitude_bits(w))
    tl.store(bits + tl.program_id(0), tl.max(best, axis=0))


@triton.jit(do_not_specialize=["programs"])
def top_of_tops(bits, out, programs, FAST: tl.constexpr):
    """One float32 number from the partial results."""
    i = tl.arange(0, PARTIALS)
    found = tl.max(tl.load(bits + i, mask=i < programs, other=0), axis=0)
    tl.store(out, found.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["n"])
def sums(
    x, partial, n,
    ALIGNED: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """How many values of each program's share are finite, their sum and the sum of their squares."""
    if ALIGNED:
        n = n // 16 * 16
    first = tl.program_id(0).to(tl.int64) * (SHARE * BLOCK)
    lane = tl.arange(0, BLOCK)
    count, total, square = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for step in range(SHARE):
        i = first + step * BLOCK + lane
        w = widened(tl.load(x + i, mask=i < n, other=0.0), FAST)
        finite = magnitude_bits(w) < INFINITY
        wide = tl.where(finite, w, 0.0).to(tl.float64)
        count += (finite & (i < n)).to(tl.int32)
        total += wide
        square += wide * wide
    at = partial + tl.program_id(0)
    tl.store(at, tl.sum(count, axis=0).to(tl.float64))
    tl.store(at + PARTIALS, tl.sum(total, axis=0))
    tl.store(at + 2 * PARTIALS, tl.sum(square, axis=0))


@triton.jit(do_not_specialize=["programs"])
def moments(partial, out, programs, FAST: tl.constexpr):
    """Mean, standard deviation and root mean square, as three float32 numbers."""
    i = tl.arange(0, PARTIALS)
    count = tl.sum(tl.load(partial + i, mask=i < programs, other=0.0), axis=0)
    total = tl.sum(tl.load(partial + PARTIALS + i, mask=i < programs, other=0.0), axis=0)
    square = tl.sum(tl.load(partial + 2 * PARTIALS + i, mask=i < programs, other=0.0), axis=0)
    many = tl.maximum(count, 1.0)
    mean, mean_square = total / many, square / many
    variance = tl.maximum(mean_square - mean * mean, 0.0)
    tl.store(out, mean.to(tl.float32))
    tl.store(out + 1, tl.sqrt(variance).to(tl.float32))
    tl.store(out + 2, tl.sqrt(mean_square).to(tl.float32))

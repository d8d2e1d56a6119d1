"""Triton: the same fault on many tensors by one launch.

What a kernel is told of a tensor (where it is, where the result goes, how long it is) is in a table on the card, a row per
tensor. Places are written there in units of 16 bytes from a base that is an argument: the compiler then sees that it can move
16 bytes at once. (A pointer that is read from memory moves two at a time, whatever hints it is given.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.formats import coded, scales
from shaketable.faults.gpu.kernels.measure import ADDITIVE, RELATIVE, differs
from shaketable.faults.gpu.kernels.noise import joined, mix64, normals, struck
from shaketable.faults.gpu.kernels.tiles import INFINITY, magnitude_bits, widened

ROW = tl.constexpr(5)
"""Words of a row: source, target, values; the number of its first program; what tells the key of its noise from others."""
SUMS = tl.constexpr(7)
"""What is told of a draw: values, changed, alive, survived; sums of squared errors, values and relative errors."""
IN_SIZES = tl.constexpr(2)
"""Noise in units of a tensor's root mean square."""
PARTS = tl.constexpr(2)


@triton.jit
def quantize_many(
    base, table, owners,
    UNIT: tl.constexpr, KIND: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Formats whose blocks share a scale, on tensors whose rows they divide; `owners` says which tensor a program works on.

    UNIT is how many values there are in 16 bytes.
    """
    row = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * ROW
    x, y = base + tl.load(row) * UNIT, base + tl.load(row + 1) * UNIT
    segment = (tl.program_id(0) - tl.load(row + 3)) * GROUP + tl.arange(0, GROUP)
    lane = tl.arange(0, LENGTH)
    offset = (segment * LENGTH)[:, None] + lane[None, :]
    inside = (segment * LENGTH < tl.load(row + 2))[:, None] & (lane >= 0)[None, :]
    value = tl.load(x + offset, mask=inside, other=0.0)
    there, back = scales(tl.max(magnitude_bits(widened(value, FAST)), axis=1)[:, None], 0.0, KIND)
    tl.store(y + offset, coded(value, there, back, offset, 0, 0, KIND, PARTS, False, FAST), mask=inside)


@triton.jit
def sized(x, n, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """The root mean square of the finite values, as `moments` computes it from one program's share."""
    count, square = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64)
    for block in range(BLOCKS):
        i = block * BLOCK + tl.arange(0, BLOCK)
        w = widened(tl.load(x + i, mask=i < n, other=0.0), FAST)
        finite = magnitude_bits(w) < INFINITY
        wide = tl.where(finite, w, 0.0).to(tl.float64)
        count += (finite & (i < n)).to(tl.int32)
        square += wide * wide
    many = tl.maximum(tl.sum(count, axis=0).to(tl.float64), 1.0)
    return tl.sqrt(tl.sum(square, axis=0) / many).to(tl.float32)


@triton.jit
def lane_changes(x, y, inside, FAST: tl.constexpr):
    """What a tile changed, per value: exists, changed, alive, survived; error, clean value and relative error where finite."""
    w, v = widened(x, FAST), widened(y, FAST)
    finite = inside & (magnitude_bits(w) < INFINITY) & (magnitude_bits(v) < INFINITY)
    alive = inside & (w != 0)
    clean = tl.where(finite, w, 0.0)
    error = tl.where(finite, v, 0.0) - clean
    ratio = tl.where(clean != 0, error / tl.where(clean != 0, clean, 1.0), 0.0)
    changed = differs(x, y, inside, FAST).to(tl.int32)
    counts = inside.to(tl.int32), changed, alive.to(tl.int32), (alive & (v != 0)).to(tl.int32)
    return counts[0], counts[1], counts[2], counts[3], error.to(tl.float64), clean.to(tl.float64), ratio.to(tl.float64)


@triton.jit(do_not_specialize=["low", "high"])
def draw_many(
    base, table, proof, low, high, scale,
    UNIT: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Noise on small tensors, one program for each: what `noise` does, with a unit that is computed here; and what it changed.

    BLOCKS is as many as the longest of them needs. The moment of the draw comes in two words.
    """
    row = table + tl.program_id(0) * ROW
    x, y = base + tl.load(row) * UNIT, base + tl.load(row + 1) * UNIT
    n = tl.load(row + 2).to(tl.int32)
    key = mix64(mix64(tl.load(row + 4).to(tl.uint64, bitcast=True) ^ joined(low, high)) ^ 0xD1CE)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    if KIND == IN_SIZES:
        scale = scale * sized(x, n, BLOCKS, BLOCK, FAST)
    values, changed = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    alive, survived = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    errors, squares, ratios = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(BLOCKS):
        i = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0)
        z = normals(block, k0, k1, FAST, BLOCK)
        result = struck(value, z, scale, RELATIVE if KIND == RELATIVE else ADDITIVE, FAST)
        tl.store(y + i, result, mask=i < n)
        inside, differs, is_alive, survives, error, wide, ratio = lane_changes(value, result, i < n, FAST)
        values += inside
        changed += differs
        alive += is_alive
        survived += survives
        errors += error * error
        squares += wide * wide
        ratios += ratio * ratio
    at = proof + tl.program_id(0) * SUMS
    tl.store(at, tl.sum(values, axis=0).to(tl.float64))
    tl.store(at + 1, tl.sum(changed, axis=0).to(tl.float64))
    tl.store(at + 2, tl.sum(alive, axis=0).to(tl.float64))
    tl.store(at + 3, tl.sum(survived, axis=0).to(tl.float64))
    tl.store(at + 4, tl.sum(errors, axis=0))
    tl.store(at + 5, tl.sum(squares, axis=0))
    tl.store(at + 6, tl.sum(ratios, axis=0))

"""Triton: what a strike changed, summed up where it happened."""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.tiles import INFINITY, magnitude_bits, widened

PROOF = tl.constexpr(10)
"""Sums per tap on a board: see `inject/board.py`."""
TOLD = tl.constexpr(8)
"""Added to the number of the phase in passes whose changes are told: the first eight, then every 32nd; it takes a while."""


@triton.jit
def told(x, y, inside, FAST: tl.constexpr):
    """What a tile changed, per lane: exists, changed, alive, survived; error, value and relative error where all is finite."""
    w, v = widened(x, FAST), widened(y, FAST)
    finite = inside & (magnitude_bits(w) < INFINITY) & (magnitude_bits(v) < INFINITY)
    alive = inside & (w != 0)
    differs = inside & (w != v) & ((w == w) | (v == v))
    clean = tl.where(finite, w, 0.0)
    error = tl.where(finite, v, 0.0) - clean
    ratio = tl.where(clean != 0, error / tl.where(clean != 0, clean, 1.0), 0.0)
    counts = inside.to(tl.int32), differs.to(tl.int32), alive.to(tl.int32), (alive & (v != 0)).to(tl.int32)
    return counts[0], counts[1], counts[2], counts[3], error.to(tl.float64), clean.to(tl.float64), ratio.to(tl.float64)


@triton.jit
def tell(x, y, inside, proof, FAST: tl.constexpr):
    """Add what a tile changed to the sums of its tap."""
    values, changed, alive, survived, error, clean, ratio = told(x, y, inside, FAST)
    tl.atomic_add(proof, tl.sum(values).to(tl.float64))
    tl.atomic_add(proof + 1, tl.sum(changed).to(tl.float64))
    tl.atomic_add(proof + 2, tl.sum(alive).to(tl.float64))
    tl.atomic_add(proof + 3, tl.sum(survived).to(tl.float64))
    tl.atomic_add(proof + 4, tl.sum(error * error))
    tl.atomic_add(proof + 5, tl.sum(clean * clean))
    tl.atomic_add(proof + 6, tl.sum(ratio * ratio))

"""Triton: what a fault changed, summed up where it happened, and added to the row of its tap.

The columns of a row are those of `inject/counters.py`. A program that measures looks at its values in small steps: a kernel
holds as many registers as the most demanding of its programs, and sums of eight bytes are demanding (180 by a block at once,
which leaves a GPU a fifth of its threads; 40 by steps).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.tiles import INFINITY, magnitude_bits, widened

WIDTH = tl.constexpr(16)
"""Columns of a row: see `inject/counters.py`, whose order this is."""
MEASURED, ERROR, VALUES, CHANGED, ALIVE, SURVIVED = (tl.constexpr(i) for i in range(4, 10))
MAGNITUDES, MAGNITUDE, MAGNITUDE_SQUARE, MARK = (tl.constexpr(i) for i in range(10, 14))
PHASE, DUE, ALL = tl.constexpr(7), tl.constexpr(8), tl.constexpr(16)
"""Flags of a row in a pass: the number of the phase from one on; measure; count what changes in every value."""
RELATIVE, ADDITIVE, BIAS, GAIN, SYSTEMATIC, OTHER = (tl.constexpr(i) for i in range(6))
"""Kinds of faults, as far as their magnitude can be read back here."""


@triton.jit
def differs(x, y, inside, FAST: tl.constexpr):
    """Which values of a tile have changed; a NaN that stays one has not."""
    w, v = widened(x, FAST), widened(y, FAST)
    return inside & (w != v) & ((w == w) | (v == v))


@triton.jit
def changes(x, y, inside, KIND: tl.constexpr, FAST: tl.constexpr):
    """Sums over a tile: counts (exists, changed, alive, survived, finite, nonzero), squared error, squared clean value, and
    the one from which the magnitude of this kind is made."""
    w, v = widened(x, FAST), widened(y, FAST)
    finite = inside & (magnitude_bits(w) < INFINITY) & (magnitude_bits(v) < INFINITY)
    alive = inside & (w != 0)
    nonzero = finite & alive
    clean = tl.where(finite, w, 0.0)
    error = tl.where(finite, v, 0.0) - clean
    if KIND == RELATIVE:
        third = tl.where(nonzero, error / tl.where(nonzero, clean, 1.0), 0.0).to(tl.float64)
        third = third * third
    elif KIND == GAIN:
        third = error.to(tl.float64) * clean.to(tl.float64)
    else:
        third = tl.where(nonzero, tl.abs(error), 0.0).to(tl.float64)
    e, c = error.to(tl.float64), clean.to(tl.float64)
    counts = tl.sum(inside.to(tl.int32)), tl.sum(differs(x, y, inside, FAST).to(tl.int32)), tl.sum(alive.to(tl.int32))
    more = tl.sum((alive & (v != 0)).to(tl.int32)), tl.sum(finite.to(tl.int32)), tl.sum(nonzero.to(tl.int32))
    return counts[0], counts[1], counts[2], more[0], more[1], more[2], tl.sum(e * e), tl.sum(c * c), tl.sum(third)


@triton.jit
def add_measured(row, values, changed, alive, survived, finite, nonzero, error, size, third, KIND: tl.constexpr):
    """Add one measured fire to the row of its tap."""
    tl.atomic_add(row + MEASURED, 1.0)
    tl.atomic_add(row + ERROR, tl.where(size > 0, error / tl.where(size > 0, size, 1.0), 0.0))
    tl.atomic_add(row + VALUES, values.to(tl.float64))
    tl.atomic_add(row + CHANGED, changed.to(tl.float64))
    tl.atomic_add(row + ALIVE, alive.to(tl.float64))
    tl.atomic_add(row + SURVIVED, survived.to(tl.float64))
    if KIND != OTHER:
        if KIND == ADDITIVE:
            over, under = error, finite.to(tl.float64)
        elif KIND == GAIN:
            over, under = third, size
        else:
            over, under = third, nonzero.to(tl.float64)
        tells = under > 0
        found = over / tl.where(tells, under, 1.0)
        if KIND <= ADDITIVE:
            found = tl.sqrt(found)
        tl.atomic_add(row + MAGNITUDES, tl.where(tells, 1.0, 0.0).to(tl.float64))
        tl.atomic_add(row + MAGNITUDE, tl.where(tells, found, 0.0))
        tl.atomic_add(row + MAGNITUDE_SQUARE, tl.where(tells, found * found, 0.0))


@triton.jit(do_not_specialize=["n", "row", "place", "width", "stride"])
def tell(
    x, y, n, rows, sums, row, place, width, stride,
    KIND: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Count and, when it is due, measure what other operators than one kernel did. One program, `n` values of a pair.

    The values lie in pieces of `width`, of which one begins every `stride`.
    """
    flags = tl.load(rows + 4 * row + 3)
    if flags != 0:
        sums += WIDTH * place
        tl.atomic_add(sums + (flags & PHASE) - 1, 1.0)
        if (flags & DUE) != 0:
            values, changed, alive, survived, finite, nonzero = 0, 0, 0, 0, 0, 0
            error, size, third = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
            for step in range(STEPS):
                i = step * BLOCK + tl.arange(0, BLOCK)
                at = (i // width).to(tl.int64) * stride + i % width
                a, b = tl.load(x + at, mask=i < n, other=0.0), tl.load(y + at, mask=i < n, other=0.0)
                v, c, al, su, f, nz, e, s, t = changes(a, b, i < n, KIND, FAST)
                values, changed, alive = values + v, changed + c, alive + al
                survived, finite, nonzero = survived + su, finite + f, nonzero + nz
                error, size, third = error + e, size + s, third + t
            add_measured(sums, values, changed, alive, survived, finite, nonzero, error, size, third, KIND)


@triton.jit
def heads(head, marks, rows, sums, BLOCK: tl.constexpr):
    """What compiled graphs did, a program for each application: its fire and, when it is due, its first values.

    Where there are fewer values than `BLOCK`, and where a value is not a number, the clean one is NaN and is left out.
    """
    i = tl.program_id(0)
    row, place, kind = tl.load(marks + 3 * i), tl.load(marks + 3 * i + 1), tl.load(marks + 3 * i + 2)
    flags = tl.load(rows + 4 * row + 3)
    if flags != 0:
        sums += WIDTH * place
        tl.atomic_add(sums + (flags & PHASE) - 1, 1.0)
        if (flags & DUE) != 0:
            at = head + 2 * BLOCK * i + tl.arange(0, BLOCK)
            clean, faulty = tl.load(at), tl.load(at + BLOCK)
            if kind == RELATIVE:
                v, c, al, su, f, nz, e, s, t = changes(clean, faulty, clean == clean, RELATIVE, True)
                add_measured(sums, v, c, al, su, f, nz, e, s, t, RELATIVE)
            else:
                v, c, al, su, f, nz, e, s, t = changes(clean, faulty, clean == clean, ADDITIVE, True)
                add_measured(sums, v, c, al, su, f, nz, e, s, t, ADDITIVE)

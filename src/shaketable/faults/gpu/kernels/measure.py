"""Triton: what a fault changed, summed up where it happened, and added to the row of its tap.

The columns of a row are those of `inject/counters.py`. A program that measures looks at its values in small steps: a kernel
holds as many registers as the most demanding of its programs, and sums of eight bytes are demanding (180 by a block at once,
which leaves a GPU a fifth of its threads; 40 by steps). It adds up place by place, and over the places once, at the end:
each sum over the places of a tile makes the whole program wait, and eight of them at every step took 20 microseconds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.tiles import INFINITY, magnitude_bits, widened

WIDTH = tl.constexpr(16)
"""Columns of a row: see `inject/counters.py`, whose order this is."""
MEASURED, ERROR, VALUES, CHANGED, ALIVE, SURVIVED = (tl.constexpr(i) for i in range(4, 10))
MAGNITUDES, MAGNITUDE, MAGNITUDE_SQUARE, MARK = (tl.constexpr(i) for i in range(10, 14))
SEEN = tl.constexpr(15)
"""Whether a change was seen beside what was measured."""
PHASE, DUE, ALL = tl.constexpr(7), tl.constexpr(8), tl.constexpr(16)
"""Flags of a row in a pass: the number of the phase from one on; measure; look for a change all over the tensor."""
RELATIVE, ADDITIVE, BIAS, GAIN, SYSTEMATIC, OTHER = (tl.constexpr(i) for i in range(6))
"""Kinds of faults, as far as their magnitude can be read back here."""


@triton.jit
def differs(x, y, inside, FAST: tl.constexpr):
    """Which values of a tile have changed; a NaN that stays one has not."""
    w, v = widened(x, FAST), widened(y, FAST)
    return inside & (w != v) & ((w == w) | (v == v))


@triton.jit
def nothing():
    """A sum of no values."""
    return tl.zeros((), tl.float64)


@triton.jit
def no_counts(BLOCK: tl.constexpr):
    """What `counts` adds to."""
    none = tl.zeros((BLOCK,), tl.int32)
    return none, none, none, none


@triton.jit
def counts(values, changed, alive, survived, x, y, inside, FAST: tl.constexpr):
    """Count, place by place, which values of a tile there are, have changed, were not zero, and still are not."""
    w, v = widened(x, FAST), widened(y, FAST)
    lives = inside & (w != 0)
    changed += differs(x, y, inside, FAST).to(tl.int32)
    return values + inside.to(tl.int32), changed, alive + lives.to(tl.int32), survived + (lives & (v != 0)).to(tl.int32)


@triton.jit
def add_counts(row, values, changed, alive, survived):
    """Add what `counts` found to the row of a tap."""
    tl.atomic_add(row + VALUES, tl.sum(values).to(tl.float64))
    tl.atomic_add(row + CHANGED, tl.sum(changed).to(tl.float64))
    tl.atomic_add(row + ALIVE, tl.sum(alive).to(tl.float64))
    tl.atomic_add(row + SURVIVED, tl.sum(survived).to(tl.float64))


@triton.jit
def no_changes(BLOCK: tl.constexpr):
    """What the results of `changes` are added to."""
    none = tl.zeros((BLOCK,), tl.float64)
    return none, none, none, none


@triton.jit
def changes(x, y, inside, KIND: tl.constexpr, FAST: tl.constexpr):
    """Place by place: squared error, squared clean value, and the two whose sums' quotient is the magnitude of this kind."""
    w, v = widened(x, FAST), widened(y, FAST)
    finite = inside & (magnitude_bits(w) < INFINITY) & (magnitude_bits(v) < INFINITY)
    nonzero = finite & (w != 0)
    clean = tl.where(finite, w, 0.0)
    error = tl.where(finite, v, 0.0) - clean
    e, c = error.to(tl.float64), clean.to(tl.float64)
    if KIND == RELATIVE:
        over = tl.where(nonzero, error / tl.where(nonzero, clean, 1.0), 0.0).to(tl.float64)
        over = over * over
    elif KIND == GAIN:
        over = e * c
    elif KIND == ADDITIVE:
        over = e * e
    else:
        over = tl.where(nonzero, tl.abs(error), 0.0).to(tl.float64)
    if KIND == GAIN:
        under = c * c
    else:
        under = (finite if KIND == ADDITIVE else nonzero).to(tl.float64)
    return e * e, c * c, over, under


@triton.jit
def quotient(over, under):
    """over / under, 0 where there is nothing to divide by.

    The division is in float32, which takes a quarter of the registers; both are brought into its range by a power of two first.
    """
    some = tl.where(under > 0, under, 1.0)
    exponent = (some.to(tl.int64, bitcast=True) >> 52) & 0x7FF
    scale = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    ratio = (over * scale).to(tl.float32) / (some * scale).to(tl.float32)
    return tl.where(under > 0, ratio, 0.0).to(tl.float64)


@triton.jit
def add_measured(row, error, size, over, under, KIND: tl.constexpr):
    """Add one measured fire to the row of its tap, all but its counts; given what `changes` found, added up place by place."""
    error, size, over, under = tl.sum(error), tl.sum(size), tl.sum(over), tl.sum(under)
    tl.atomic_add(row + MEASURED, 1.0)
    tl.atomic_add(row + ERROR, quotient(error, size))
    if KIND != OTHER:
        tells = under > 0
        found = quotient(over, under)
        if KIND <= ADDITIVE:
            found = tl.sqrt(found.to(tl.float32)).to(tl.float64)
        tl.atomic_add(row + MAGNITUDES, tl.where(tells, 1.0, 0.0).to(tl.float64))
        tl.atomic_add(row + MAGNITUDE, found)
        tl.atomic_add(row + MAGNITUDE_SQUARE, found * found)


@triton.jit(do_not_specialize=["n", "row", "place", "width", "stride"])
def tell(
    x, y, n, rows, sums, row, place, width, stride,
    KIND: tl.constexpr, SPARSE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Count and, when it is due, measure what other operators than one kernel did. One program, `n` values of a pair.

    The values lie in pieces of `width`, of which one begins every `stride`. Of a `SPARSE` fault those that have changed
    tell the magnitude.
    """
    flags = tl.load(rows + 4 * row + 3)
    if flags != 0:
        sums += WIDTH * place
        tl.atomic_add(sums + (flags & PHASE) - 1, 1.0)
        if (flags & DUE) != 0:
            error, size, over, under = no_changes(BLOCK)
            values, changed, alive, survived = no_counts(BLOCK)
            for step in range(STEPS):
                i = step * BLOCK + tl.arange(0, BLOCK)
                at = (i // width).to(tl.int64) * stride + i % width
                a, b = tl.load(x + at, mask=i < n, other=0.0), tl.load(y + at, mask=i < n, other=0.0)
                values, changed, alive, survived = counts(values, changed, alive, survived, a, b, i < n, FAST)
                e, s, o, u = changes(a, b, i < n, KIND, FAST)
                if SPARSE:
                    _, _, o, u = changes(a, b, differs(a, b, i < n, FAST), KIND, FAST)
                error, size, over, under = error + e, size + s, over + o, under + u
            add_counts(sums, values, changed, alive, survived)
            add_measured(sums, error, size, over, under, KIND)


@triton.jit(do_not_specialize=["n", "width", "stride"])
def twelve_sums(x, y, out, n, width, stride, STEPS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """The sums of `faults/sums.py` over `n` values of a pair, which lie as for `tell`. One program."""
    values, changed, alive, survived, finite, nonzero = nothing(), nothing(), nothing(), nothing(), nothing(), nothing()
    error, size, ratio, deviation, cross = nothing(), nothing(), nothing(), nothing(), nothing()
    for step in range(STEPS):
        i = step * BLOCK + tl.arange(0, BLOCK)
        at = (i // width).to(tl.int64) * stride + i % width
        inside = i < n
        a, b = tl.load(x + at, mask=inside, other=0.0), tl.load(y + at, mask=inside, other=0.0)
        w, v = widened(a, FAST), widened(b, FAST)
        fine = inside & (magnitude_bits(w) < INFINITY) & (magnitude_bits(v) < INFINITY)
        lives = inside & (w != 0)
        tells = fine & lives
        clean = tl.where(fine, w, 0.0)
        off = tl.where(fine, v, 0.0) - clean
        e, c = off.to(tl.float64), clean.to(tl.float64)
        r = tl.where(tells, off / tl.where(tells, clean, 1.0), 0.0).to(tl.float64)
        values += tl.sum(inside.to(tl.int32)).to(tl.float64)
        changed += tl.sum(differs(a, b, inside, FAST).to(tl.int32)).to(tl.float64)
        alive += tl.sum(lives.to(tl.int32)).to(tl.float64)
        survived += tl.sum((lives & (v != 0)).to(tl.int32)).to(tl.float64)
        finite += tl.sum(fine.to(tl.int32)).to(tl.float64)
        nonzero += tl.sum(tells.to(tl.int32)).to(tl.float64)
        error += tl.sum(e * e)
        size += tl.sum(c * c)
        ratio += tl.sum(r * r)
        deviation += tl.sum(tl.where(tells, tl.abs(e), 0.0))
        cross += tl.sum(e * c)
    tl.store(out, values)
    tl.store(out + 1, changed)
    tl.store(out + 2, alive)
    tl.store(out + 3, survived)
    tl.store(out + 4, finite)
    tl.store(out + 5, nonzero)
    tl.store(out + 6, error)
    tl.store(out + 7, size)
    tl.store(out + 8, size)
    tl.store(out + 9, ratio)
    tl.store(out + 10, deviation)
    tl.store(out + 11, cross)

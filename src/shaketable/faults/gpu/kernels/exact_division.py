"""Triton: a correctly rounded quotient for three instructions a value.

A card's exact division is an estimate, two corrections, a test whether all went well and a call where it did not: twenty
instructions and a branch for each value. Values that share a divisor b share r, its inverse correctly rounded, and then
(Markstein 1990)

    q = a·r,    rest = a − q·b,    a / b = q + rest·r

is the same float as the division, where the last two are fused: one rounding each. Why that holds. In units of the quotient's
last place, q is off by d ≤ 1/2 + |a/b|·|b·r − 1| < 3/2, the sum by d·|b·r − 1| ≤ d·b·2^-25 (b between 1 and 2), and a quotient
is never nearer than 2^-24 / b to a tie between two floats. So only the ties matter, where d is 1/2 or 3/2. At 1/2 the error is
smaller than that distance. At 3/2 both a and b must end in some twenty ones: few pairs, and the test tries them all.

Over- and underflow are kept away by a power of two, `lift`, for small divisors; with it every rest that can matter is exact,
and a quotient too small for that is far below the smallest step of the grid that it is rounded to. So this is a quotient *for a
grid*; stochastic rounding looks at the last bit of the smallest remainder, and divides. Rejected: a branch that divides where
the divisor is extreme. It needs the smallest divisor of all segments in a program, and both ways lie in the code.

Divisors are positive, infinite or NaN: the last two make every quotient NaN. (Finite over infinite would be 0, but an infinite
scale makes NaN of it on the way back.)
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALL, LIFT = tl.constexpr(2.0**-30), tl.constexpr(2.0**96)


@triton.jit
def fused(a, b, c, FAST: tl.constexpr):
    """a·b + c for float32, rounded once.

    The interpreter's own rounds twice. There the product is exact in float64 and so is the error of the sum, which makes the
    last bit of an inexact sum odd: rounding such a sum to float32 is as good as rounding the exact one.
    """
    if FAST:
        result = tl.fma(a, b, c)
    else:
        product, last = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
        total = product + last
        part = total - product
        error = (product - (total - part)) + (last - part)
        bits = total.to(tl.int64, bitcast=True)
        step = tl.where((error > 0) == (total > 0), 1, -1)
        odd = tl.where((tl.abs(error) > 0) & (bits % 2 == 0), bits + step, bits)
        result = odd.to(tl.float64, bitcast=True).to(tl.float32)
    return result


@triton.jit
def quotient(a, scale, FAST: tl.constexpr):
    """a / scale as a grid of 8 bits sees it, for a tile of magnitudes and the scale of each of its segments."""
    lift = tl.where(scale < SMALL, LIFT, 1.0)
    b = scale * lift
    inverse = tl.div_rn(1.0, b)
    a = a * lift
    q = a * inverse
    return fused(fused(q, -1.0 * b, a, FAST), inverse, q, FAST)

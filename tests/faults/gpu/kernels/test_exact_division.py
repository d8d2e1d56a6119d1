"""The quotient from one inverse per segment: the bits of an exact division, wherever a grid could tell the difference.

Three oracles: Python's fractions for what is rounded once, numpy's own division (correctly rounded) for quotients, and
`to_grid` of formats.py for what becomes of them.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from shaketable.faults.formats import to_e4m3, to_e5m2
from tests.faults.gpu.kernel_route import DEVICE, INF, NAN, ON_GPU, kernels, same

pytestmark = kernels
TOP = {to_e4m3: 448.0, to_e5m2: 57344.0}


def kernel(name):
    """A kernel that calls one function on three columns of float32; Triton is imported when a test runs, not before."""
    from tests.faults.gpu.kernels import exact_division_probe

    return getattr(exact_division_probe, name)


def probed(name, *columns):
    columns = [torch.as_tensor(np.ascontiguousarray(c, dtype=np.float32), device=DEVICE) for c in columns]
    out = torch.empty_like(columns[0])
    n = out.numel()
    with np.errstate(all="ignore"):
        kernel(name)[(-(-n // 8192),)](*columns, out, n, FAST=ON_GPU, BLOCK=8192, enable_fp_fusion=False)
    return out.cpu().numpy()


def floats(mantissas, exponents):
    return (np.asarray(mantissas, dtype=np.int64) | 0x800000) * np.exp2(np.asarray(exponents, dtype=np.float64) - 23)


def ties(divisors):
    """Dividends whose quotients lie as near to a tie between two floats as quotients can: A·2^s = B·(2M + 1) + t, t small and odd."""
    found = []
    for b in map(int, divisors):
        power = (b & -b).bit_length() - 1
        for shift in (24, 25):
            modulus = 2 ** (shift - power) if power < shift else 1
            for t in (1, -1, 3, -3, 5, -5):
                if modulus == 1:
                    continue
                inverse = pow(b >> power, -1, modulus)
                for m in range((-t * inverse) % modulus, 2**25, modulus):
                    a, left = divmod(b * m + (t << power), 2**shift)
                    if 2**24 <= m < 2**25 and m % 2 and not left and 2**23 <= a < 2**24:
                        found.append((a, b))
    return np.array(found, dtype=np.int64).T


def test_a_fused_product_and_sum_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(20_000).astype(np.float32) for _ in range(2))
    near = -(a.astype(np.float64) * b).astype(np.float32)
    c = np.where(rng.random(20_000) < 0.5, near, rng.standard_normal(20_000).astype(np.float32) * np.float32(2.0**-25))
    got = probed("fused_probe", a, b, c)
    for x, y, z, r in zip(a[:4000], b[:4000], c[:4000], got[:4000], strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        gaps = [
            abs(Fraction(float(f)) - exact) for f in (r, np.nextafter(r, np.float32(INF)), np.nextafter(r, np.float32(-INF)))
        ]
        assert gaps[0] == min(gaps)


def test_quotients_next_to_ties_are_those_of_a_division():
    rng = np.random.default_rng(1)
    divisors = np.concatenate([rng.integers(2**23, 2**24, 400), 2**24 - np.arange(1, 200), 2**23 + np.arange(1, 200)])
    a, b = ties(divisors)
    assert len(a) > 1000
    for exponent in (0, -17, 8):
        x, y = floats(a, exponent).astype(np.float32), floats(b, 0).astype(np.float32)
        assert np.array_equal(probed("quotient_probe", x, y, y), x / y)


def test_the_pairs_that_the_proof_leaves_open_are_tried():
    """Both mantissas within 64 of all ones, and of one."""
    ends = np.concatenate([2**24 - np.arange(1, 65), 2**23 + np.arange(64)])
    a, b = (m.ravel() for m in np.meshgrid(ends, ends))
    for exponent in (-100, -31, -30, -29, 0, 60, 118):
        x, y = floats(a, exponent + 1).astype(np.float32), floats(b, exponent).astype(np.float32)
        assert np.array_equal(probed("quotient_probe", x, y, y), x / y)


def extreme_scales(top):
    """From the smallest subnormal to what the largest float makes, the odd ends of each, and what is no number."""
    rng = np.random.default_rng(2)
    spread = np.exp2(rng.uniform(-149, 128, 300 if not ON_GPU else 3000)) / top
    edges = [2.0**e * f for e in (-149, -148, -146, -127, -126, -125, -31, -30, -29, 0, 64) for f in (1.0, 1.5, 2 - 2**-23)]
    tops = [k * 2.0**-149 for k in (1, 2, 3, 7, 447, 448, 671, 672, 57344)] + [3.3895313892515355e38, 3.4028234663852886e38]
    with np.errstate(all="ignore"):
        scales = [*np.float32(spread), *np.float32(edges), *(np.float32(t) / np.float32(top) for t in tops), INF, NAN]
    return np.array([s for s in np.array(scales, dtype=np.float32) if s != 0])


@pytest.mark.parametrize("grid", TOP, ids=lambda g: g.__name__)
def test_every_bfloat16_over_extreme_scales_lands_on_the_same_point(grid):
    """As large as a segment with this scale can hold: its largest value made the scale."""
    numbers = (torch.arange(2**15, dtype=torch.int32) << 16).view(torch.float32).numpy()
    for scale in extreme_scales(TOP[grid]):
        with np.errstate(all="ignore"):
            a = numbers if not np.isfinite(scale) else numbers[~(numbers / scale > 1.5 * TOP[grid]) & np.isfinite(numbers)]
            wanted = a / scale
        got = probed("quotient_probe", a, np.full_like(a, scale), a)
        back = torch.tensor(float(scale))
        assert same(grid(torch.from_numpy(got)) * back, grid(torch.from_numpy(wanted)) * back), scale


@pytest.mark.parametrize("grid", TOP, ids=lambda g: g.__name__)
def test_random_float32_over_random_scales_land_on_the_same_point(grid):
    rng = np.random.default_rng(3)
    scale = np.repeat((np.exp2(rng.uniform(-146, 128, 4000)) / TOP[grid]).astype(np.float32), 64)
    scale = np.where(scale == 0, np.float32(1), scale)
    a = (scale.astype(np.float64) * TOP[grid] * np.exp2(-rng.uniform(0, 24, scale.size))).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = a / scale
    got = probed("quotient_probe", a, scale, a)
    assert same(grid(torch.from_numpy(got)), grid(torch.from_numpy(wanted)))
    plain = wanted > 2.0**-17
    assert np.array_equal(got[plain], wanted[plain])

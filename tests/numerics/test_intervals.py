"""Rounding intervals: what any correct device returns is inside, and little else."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from shaketable.numerics.intervals import Around, Precision, Product

EXACT = Precision()
NUMPY = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
DTYPES = list(NUMPY)


def as_torch(values, dtype):
    """A numpy array, rounded by numpy or ml_dtypes, as a torch tensor of that dtype."""
    return torch.from_numpy(np.asarray(values).astype(NUMPY[dtype]).astype(np.float64)).to(dtype)


def as_numpy(tensor):
    return tensor.to(torch.float64).numpy()


def moved(values, dtype, steps):
    """Values moved by so many representable numbers; ml_dtypes and numpy do the stepping."""
    found = as_numpy(values).astype(NUMPY[dtype])
    for _ in range(abs(steps)):
        found = np.nextafter(found, np.asarray(np.inf if steps > 0 else -np.inf, NUMPY[dtype]))
    return as_torch(found, dtype)


def sequential(products):
    total = np.zeros(products.shape[:-1], np.float32)
    for k in range(products.shape[-1]):
        total = total + products[..., k]
    return total


def pairwise(products):
    while products.shape[-1] > 1:
        if products.shape[-1] % 2:
            products = np.concatenate([products, np.zeros_like(products[..., :1])], -1)
        products = products[..., ::2] + products[..., 1::2]
    return products[..., 0]


def lanes(products):
    """Eight running sums, as a vector unit keeps them."""
    return pairwise(np.stack([sequential(products[..., i::8]) for i in range(min(8, products.shape[-1]))], -1))


def tiles(products):
    """Running sums of sixteen, added one after another, as a tiled kernel does."""
    return sequential(np.stack([sequential(products[..., i : i + 16]) for i in range(0, products.shape[-1], 16)], -1))


def exact(products):
    """The true sum, in whole-number arithmetic; the products of the test are exact in float64."""
    flat = products.reshape(-1, products.shape[-1])
    return np.array([float(sum(map(Fraction, row.tolist()))) for row in flat]).reshape(products.shape[:-1])


ORDERS = {f.__name__: f for f in (sequential, pairwise, lanes, tiles, exact)}


def factors(seed, k, dtype, kind="normal", rows=6, channels=5):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, k)), rng.standard_normal((channels, k)) / np.sqrt(k)
    if kind == "positive":
        x, w = abs(x), abs(w)
    elif kind == "heavy":
        x = x * np.exp(1.5 * rng.standard_normal(x.shape))
    elif kind == "cancelling":
        half = k // 2
        x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half], w[:, :half]
    return as_torch(x, dtype), as_torch(w, dtype), rng


@settings(max_examples=60)
@given(
    seed=some.integers(0, 2**32),
    k=some.integers(1, 96),
    dtype=some.sampled_from(DTYPES),
    kind=some.sampled_from(["normal", "positive", "heavy", "cancelling"]),
    order=some.sampled_from(sorted(ORDERS)),
)
def test_every_order_of_summation_is_inside(seed, k, dtype, kind, order):
    x, w, rng = factors(seed, k, dtype, kind)
    terms = as_numpy(x)[:, None, :] * as_numpy(w)
    terms = terms[..., rng.permutation(k)]
    terms = terms if order == "exact" else terms.astype(np.float32)
    got = as_torch(ORDERS[order](terms), dtype)
    assert not Product(x.double(), w, None, dtype, EXACT).outside(got).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_are_inside_and_the_next_values_are_not(dtype):
    x, w, _ = factors(0, 64, dtype)
    allowed = Product(x.double(), w, None, dtype, EXACT)
    low, high = (end.view(6, 5) for end in allowed.ends(torch.ones(6, 5, dtype=torch.bool)))
    for got in (low, high):
        assert not allowed.outside(got).any()
    assert allowed.outside(moved(high, dtype, 1)).all()
    assert allowed.outside(moved(low, dtype, -1)).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [2, 512, 513])
def test_blocks_of_channels_make_no_difference(channels, bias):
    rng = torch.Generator().manual_seed(channels)
    x = torch.randn(2, 3, 16, generator=rng).bfloat16()
    w, b = torch.randn(channels, 16, generator=rng).bfloat16(), torch.randn(channels, generator=rng).bfloat16()
    whole = Product(x.double(), w, b if bias else None, torch.bfloat16, EXACT, block=4096)
    parts = Product(x.double(), w, b if bias else None, torch.bfloat16, EXACT)
    got = torch.nn.functional.linear(x, w, b if bias else None)
    assert not parts.outside(got).any()
    got[..., -1] += 1
    got[0, 1, channels // 2 - 1] -= 1
    outside = parts.outside(got)
    assert outside.sum() == 7
    assert torch.equal(outside, whole.outside(got))
    for mine, theirs in zip(parts.ends(outside), whole.ends(outside), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_may_be_added_before_or_after_rounding(dtype):
    x, w, rng = factors(4, 64, dtype, rows=64, channels=40)
    bias = as_torch(rng.standard_normal(40), dtype)
    exact = as_numpy(x) @ as_numpy(w).T
    inside = as_torch(exact + as_numpy(bias), dtype)
    behind = as_torch(as_numpy(as_torch(exact, dtype)) + as_numpy(bias), dtype)
    assert (inside != behind).double().mean() > 0.05, "the test needs values where the two differ"
    allowed = Product(x.double(), w, bias, dtype, EXACT)
    assert not allowed.outside(inside).any()
    assert not allowed.outside(behind).any()
    assert allowed.outside(moved(inside, dtype, 3)).double().mean() > 0.95
    assert allowed.outside(as_torch(exact, dtype)).double().mean() > 0.9


def rounded_to(values, bits):
    """Float32 values with so many mantissa bits, rounded to nearest even, as tensor cores read them."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


@pytest.mark.parametrize(("bits", "documented"), [(10, 2.0**-10), (7, 2.0**-8)])
def test_documented_rounding_of_factors_is_allowed_only_when_documented(bits, documented):
    x, w, _ = factors(8, 128, torch.float32, rows=20, channels=20)
    got = as_torch(rounded_to(as_numpy(x), bits) @ rounded_to(as_numpy(w), bits).T, torch.float32)
    assert not Product(x.double(), w, None, torch.float32, Precision(product_input=documented)).outside(got).any()
    assert Product(x.double(), w, None, torch.float32, EXACT).outside(got).double().mean() > 0.85


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "got", "outside"),
    [(NAN, NAN, False), (NAN, 1.0, True), (1.0, NAN, True), (1.0, INF, True), (1e300, INF, False), (1e300, -INF, True),
     (1e300, 1.0, True), (1e300, NAN, True), (-1e300, -INF, False), (3e38, INF, True)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["around", "interval"])
def test_values_that_are_no_numbers(kind, value, got, outside):
    around = Around.relative(torch.tensor([value, 1.0], dtype=torch.float64), 4, torch.float32)
    allowed = around if kind == "around" else around.interval()
    assert allowed.outside(torch.tensor([got, 1.0])).tolist() == [outside, False]

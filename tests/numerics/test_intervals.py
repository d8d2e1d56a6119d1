"""Rounding intervals: what any correct device returns is inside, and little else."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from shaketable.numerics.intervals import TINY, Around, Precision, Product, RoundingInterval, device_precision, tolerance

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


@pytest.mark.parametrize("order", ["pairwise", "lanes", "tiles"])
@pytest.mark.parametrize("k", [64, 1024])
def test_kernels_that_sum_equal_terms_are_inside(order, k):
    """Equal terms round the same way every time: the worst of sums."""
    x, w = torch.full((1, k), 0.1), torch.rand(8, 1).expand(8, k) + 0.1
    got = torch.from_numpy(ORDERS[order]((x[:, None] * w).numpy()))
    assert not Product(x.double(), w, None, torch.float32, EXACT).outside(got).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_are_inside_and_the_next_values_are_not(dtype):
    x, w, _ = factors(0, 64, dtype)
    allowed = Product(x.double(), w, None, dtype, EXACT)
    low, high = (end.view(6, 5) for end in allowed.ends(torch.ones(6, 5, dtype=torch.bool)))
    for got in (low, high):
        assert not allowed.outside(got).any()
    assert allowed.outside(moved(high, dtype, 1)).all()
    assert allowed.outside(moved(low, dtype, -1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slack", [0.0, 1e-4, 3e-2])
def test_ends_are_the_rounded_ends_of_the_real_interval(dtype, slack):
    value = np.random.default_rng(1).standard_normal((40, 7))
    around = Around(torch.from_numpy(value), slack, dtype)
    where = torch.from_numpy(np.random.default_rng(2).random(value.shape) < 0.5)
    low, high = around.ends(where)
    assert torch.equal(low, as_torch(value - slack, dtype)[where])
    assert torch.equal(high, as_torch(value + slack, dtype)[where])
    whole = around.interval()
    assert torch.equal(whole.low[where], low) and torch.equal(whole.high[where], high)


@settings(max_examples=40)
@given(seed=some.integers(0, 2**32), dtype=some.sampled_from(DTYPES), slack=some.sampled_from([0.0, 1e-7, 1e-3, 0.2]))
def test_outside_is_what_the_ends_say(seed, dtype, slack):
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(300)
    around = Around(torch.from_numpy(value), torch.from_numpy(slack * rng.random(300)), dtype)
    got = moved(as_torch(value + slack * rng.uniform(-1.5, 1.5, 300), dtype), dtype, int(rng.integers(-2, 3)))
    low, high = around.ends(torch.ones(300, dtype=torch.bool))
    expected = (as_numpy(got) < as_numpy(low)) | (as_numpy(got) > as_numpy(high))
    assert torch.equal(around.outside(got), torch.from_numpy(expected))
    assert torch.equal(around.interval().outside(got), torch.from_numpy(expected))


def test_a_slack_of_its_own_for_every_value():
    around = Around(torch.ones(3).double(), torch.tensor([0.0, 0.1, 0.3]).double(), torch.float32)
    assert around.outside(torch.full((3,), 1.2)).tolist() == [True, True, False]


def test_one_slack_for_a_row_is_spread_over_it():
    around = Around(torch.ones(2, 3).double(), torch.tensor([[0.1], [0.3]]).double(), torch.float32)
    got = torch.full((2, 3), 1.2)
    assert around.outside(got).tolist() == [[True] * 3, [False] * 3]
    low, high = around.ends(torch.tensor([[False, True, False], [True, False, False]]))
    assert torch.allclose(low, torch.tensor([0.9, 0.7])) and torch.allclose(high, torch.tensor([1.1, 1.3]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [2, 511, 512, 513, 1061])
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


def test_a_product_without_bias_is_a_rounded_range_around_the_whole_product():
    x, w, _ = factors(3, 48, torch.float16, rows=4, channels=700)
    value = as_numpy(x) @ as_numpy(w).T
    slack = (
        2.0**-24 * (5 * np.sqrt(48) + 3) * np.linalg.norm(as_numpy(x), axis=1)[:, None] * np.linalg.norm(as_numpy(w), axis=1)
    )
    around = Around(torch.from_numpy(value), torch.from_numpy(slack + TINY), torch.float16)
    got = moved(as_torch(value, torch.float16), torch.float16, 1)
    product = Product(x.double(), w, None, torch.float16, EXACT)
    assert 0 < around.outside(got).double().mean() < 1
    assert torch.equal(product.outside(got), around.outside(got))


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


def test_a_bias_in_float32_leaves_the_interval_narrow():
    x, w, rng = factors(5, 64, torch.float32, rows=64, channels=40)
    bias = as_torch(10 * rng.standard_normal(40), torch.float32)
    allowed = Product(x.double(), w, bias, torch.float32, EXACT)
    got = torch.nn.functional.linear(x, w, bias)
    assert not allowed.outside(got).any()
    assert allowed.outside(got * (1 + 1e-4)).double().mean() > 0.95


def test_most_intervals_of_bfloat16_hold_a_single_value():
    x, w, _ = factors(6, 256, torch.bfloat16, rows=64, channels=300)
    low, high = Product(x.double(), w, None, torch.bfloat16, EXACT).ends(torch.ones(64, 300, dtype=torch.bool))
    assert (low == high).double().mean() > 0.85
    assert torch.equal(low[low == high], as_torch(as_numpy(x) @ as_numpy(w).T, torch.bfloat16).flatten()[low == high])


def test_one_step_of_bfloat16_is_seen():
    x, w, _ = factors(7, 256, torch.bfloat16, rows=64, channels=300)
    got = as_torch(as_numpy(x) @ as_numpy(w).T, torch.bfloat16)
    allowed = Product(x.double(), w, None, torch.bfloat16, EXACT)
    assert allowed.outside(moved(got, torch.bfloat16, 1)).double().mean() > 0.9


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


def test_documented_rounding_of_float32_factors_says_nothing_about_reduced_dtypes():
    x, w, _ = factors(9, 128, torch.bfloat16)
    where = torch.ones(6, 5, dtype=torch.bool)
    narrow = Product(x.double(), w, None, torch.bfloat16, EXACT).ends(where)
    same = Product(x.double(), w, None, torch.bfloat16, Precision(product_input=2.0**-10)).ends(where)
    wide = Product(x.double(), w, None, torch.bfloat16, Precision(partial_sum=2.0**-8)).ends(where)
    assert torch.equal(narrow[0], same[0]) and torch.equal(narrow[1], same[1])
    assert (wide[0] < narrow[0]).any() and (wide[1] > narrow[1]).any()


def test_relative_counts_units_of_float32():
    around = Around.relative(torch.tensor([1.0, -2.0]).double(), 4, torch.float32)
    step = torch.tensor([2.0**-23, -(2.0**-22)])
    base = torch.tensor([1.0, -2.0])
    assert around.outside(base + 2 * step).tolist() == [False, False]
    assert around.outside(base + 3 * step).tolist() == [True, True]


def test_results_too_small_for_a_device_may_be_flushed():
    around = Around.relative(torch.tensor([1e-39, 1e-36]).double(), 4, torch.float32)
    assert around.outside(torch.zeros(2)).tolist() == [False, True]


def test_where_nothing_is_asked_anything_is_allowed():
    around = Around(torch.zeros(4).double(), 0.1, torch.float32, torch.tensor([True, False, True, False]))
    assert around.outside(torch.tensor([7.0, 7.0, float("nan"), 0.0])).tolist() == [False, True, False, False]


def test_hull_is_what_either_allows():
    one, two = (
        RoundingInterval(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 5.0])),
        RoundingInterval.exactly(torch.tensor([3.0, 3.0])),
    )
    both = one.hull(two)
    assert both.outside(torch.tensor([3.0, 3.0])).tolist() == [False, False]
    assert both.outside(torch.tensor([0.5, 5.5])).tolist() == [True, True]
    assert both.outside(torch.tensor([1.0, 5.0])).tolist() == [False, False]


def test_exactly_is_one_value_of_any_dtype():
    assert RoundingInterval.exactly(torch.tensor([1, 2])).outside(torch.tensor([1, 3])).tolist() == [False, True]
    assert RoundingInterval.exactly(torch.tensor([True, False])).outside(torch.tensor([True, True])).tolist() == [False, True]
    low, high = RoundingInterval(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).ends(torch.tensor([False, True]))
    assert (low.item(), high.item()) == (2.0, 4.0)


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


@pytest.mark.parametrize("got", [5.0, -INF, NAN])
def test_an_infinite_value_allows_nothing_else(got):
    around = Around.relative(torch.tensor([INF]).double(), 4, torch.float32)
    assert around.outside(torch.tensor([got])).item()


@pytest.mark.parametrize("bias", [None, 1.0])
def test_an_infinite_input_makes_an_infinite_product(bias):
    x, w = torch.tensor([[INF, 1.0]]).half(), torch.ones(1, 2).half()
    b = None if bias is None else torch.tensor([bias]).half()
    got = torch.nn.functional.linear(x, w, b)
    assert got.item() == INF
    assert not Product(x.double(), w, b, torch.float16, EXACT).outside(got).any()


@pytest.mark.parametrize("bias", [None, torch.ones(1)])
def test_a_product_that_is_no_number_is_expected_where_the_input_is_none(bias):
    allowed = Product(torch.tensor([[NAN, 1.0]]).double(), torch.ones(1, 2), bias, torch.float32, EXACT)
    assert not allowed.outside(torch.tensor([[NAN]])).any()
    assert allowed.outside(torch.tensor([[1.0]])).all()


# ---- what is documented of a device


@pytest.fixture
def matmul_precision():
    """Torch's switch, put back afterwards."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("device", "asked", "dtype", "allowed"),
    [
        ("cpu", "highest", torch.float32, 0.0),
        ("cpu", "high", torch.float32, 0.0),
        ("cpu", "medium", torch.float32, 2.0**-8),
        ("cpu", "medium", torch.bfloat16, 0.0),
        ("cuda", "highest", torch.float32, 0.0),
        ("cuda", "high", torch.float32, 2.0**-10),
        ("cuda", "high", torch.float16, 0.0),
    ],
)
def test_the_switches_of_torch_say_what_products_may_do(matmul_precision, device, asked, dtype, allowed):
    matmul_precision(asked)
    found = device_precision(torch.device(device), dtype)
    assert (found.product_input, found.partial_sum) == (allowed, 0.0)
    assert bool(found.note) == bool(allowed)


def test_tolerances_grow_with_the_unit_roundoff():
    assert tolerance(EXACT, torch.float32) == (128.0, 2.0**-24) and tolerance(EXACT, torch.bfloat16) == (6.0, 2.0**-8)
    assert tolerance(Precision(product_input=2.0**-10), torch.float32) == (6.0, 2.0**-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wrong", [0.0, 0.004, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_host_float32_product_only_saves_time(dtype, wrong, bias):
    """Few values or many moved by one or two steps: the same answer as float64 everywhere, which it falls back to."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((1, 24, 200), (700, 200), (700,)))
    got = torch.nn.functional.linear(x, w, b if bias else None)
    steps = torch.rand(got.shape, generator=generator) < wrong
    got = torch.where(steps, moved(got, dtype, 1), got)
    product = Product(x.double(), w, b if bias else None, dtype, EXACT)
    assert product._can_compare()
    fast = product.outside(got)
    torch.set_float32_matmul_precision("medium")
    try:
        assert not product._can_compare()
        slow = product.outside(got)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(fast, slow)
    assert bool(fast.any()) == bool(wrong)

"""Rounding intervals at their edges: who is inside, which values are asked for, and what is left alone."""

import math

import pytest
import torch

from shaketable.numerics import intervals as rounding
from shaketable.numerics.intervals import TINY, UNIT, Around, Precision, Product, RoundingInterval, _is_exact, summation

UA = 2.0**-24
NAN, INF = math.nan, math.inf
EXACT = Precision()


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- units


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_the_unit_roundoff_is_half_of_the_step_at_one(dtype):
    assert UNIT[dtype] == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    ("terms", "units"), [(0, 0.0), (1, 1.0), (16, 16.0), (25, 25.0), (36, 32.25), (64, 44.0), (1024, 224.0), (4096, 576.0)]
)
def test_a_sum_is_off_by_its_terms_or_by_five_roots_and_a_sixteenth(terms, units):
    assert summation(terms) == pytest.approx(units * UA, rel=1e-12)


def test_a_device_is_documented_to_do_nothing_unless_said():
    assert (EXACT.product_input, EXACT.partial_sum, EXACT.note) == (0.0, 0.0, "")


# ---- intervals


def test_both_ends_belong_to_an_interval():
    found = RoundingInterval(t(1.0, 1.0, 1.0, 1.0), t(2.0, 2.0, 2.0, 2.0))
    assert found.outside(t(1.0, 2.0, 0.999, 2.001)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("same", [True, False], ids=["one value", "two ends"])
def test_a_value_that_is_no_number_is_allowed_where_none_was_expected(same):
    ends = t(NAN, NAN, 1.0, INF, -INF)
    found = RoundingInterval.exactly(ends) if same else RoundingInterval(ends, ends.clone())
    assert found.outside(t(NAN, 1.0, NAN, INF, INF)).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(("low", "high"), [(NAN, 1.0), (1.0, NAN)])
def test_one_end_that_is_no_number_is_enough(low, high):
    found = RoundingInterval(t(low, 1.0), t(high, 2.0))
    assert found.outside(t(NAN, NAN)).tolist() == [False, True]


def test_either_zero_is_zero():
    assert not RoundingInterval.exactly(t(0.0, -0.0)).outside(t(-0.0, 0.0)).any()


def test_ends_are_low_then_high_at_the_values_asked_for():
    found = RoundingInterval(t(1.0, 2.0, 3.0), t(4.0, 5.0, 6.0))
    low, high = found.ends(torch.tensor([True, False, True]))
    assert low.tolist() == [1.0, 3.0] and high.tolist() == [4.0, 6.0]


def test_a_hull_has_the_lower_low_and_the_higher_high():
    found = RoundingInterval(t(1.0, -5.0), t(2.0, -4.0)).hull(RoundingInterval(t(0.5, -4.5), t(1.5, -3.0)))
    assert found.low.tolist() == [0.5, -5.0] and found.high.tolist() == [2.0, -3.0]


# ---- a value with a slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_ends_are_rounded_and_so_the_nearest_value_is_always_inside(dtype):
    """A third lies between two values of the dtype: the nearer one is right even with no slack, the other is not."""
    third = double(1 / 3, -1 / 3)
    near = third.to(dtype)
    found = Around(third, 0.0, dtype)
    step = torch.finfo(dtype).eps / 4
    assert found.outside(near).tolist() == [False, False]
    assert found.outside(near + step).tolist() == [True, True] and found.outside(near - step).tolist() == [True, True]


def test_the_slack_counts_to_both_sides_and_up_to_the_last_value():
    found = Around(double(1.0, 1.0, 1.0, 1.0), 0.25, torch.float32)
    assert found.outside(t(1.25, 0.75, 1.2500002, 0.7499999)).tolist() == [False, False, True, True]


def test_relative_is_so_many_units_of_the_value_and_the_smallest_result():
    value = double(4.0, -4.0, 0.0)
    found = Around.relative(value, 8, torch.bfloat16)
    assert found.slack.tolist() == [32 * UA + TINY, 32 * UA + TINY, TINY] and found.dtype == torch.bfloat16
    assert value.tolist() == [4.0, -4.0, 0.0], "the value is left alone"


def test_judging_changes_neither_the_result_nor_the_value():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        value, got = double(1.0, INF, 3.0), t(2.0, 5.0, NAN, dtype=dtype)
        around = Around(value, double(0.1, 0.1, 0.1), dtype)
        around.outside(got)
        around.interval()
        assert value.tolist() == [1.0, INF, 3.0] and got[:2].tolist() == [2.0, 5.0]
        assert around.slack.tolist() == [0.1, 0.1, 0.1]


def test_an_infinite_value_has_no_slack_and_its_neighbours_keep_theirs():
    found = Around(double(INF, -INF, 1.0), double(INF, 1.0, 0.5), torch.float32)
    low, high = found.ends(torch.ones(3, dtype=torch.bool))
    assert low.tolist() == [INF, -INF, 0.5] and high.tolist() == [INF, -INF, 1.5]
    assert found.outside(t(INF, -INF, 1.5)).tolist() == [False, False, False]
    assert found.outside(t(7.0, INF, 1.6)).tolist() == [True, True, True]


def test_one_slack_for_all_values_is_rounded_at_those_asked_for():
    low, high = Around(double(1.0, 2.0, 3.0), 0.5, torch.float32).ends(torch.tensor([False, True, True]))
    assert low.tolist() == [1.5, 2.5] and high.tolist() == [2.5, 3.5]


def test_a_value_for_a_whole_row_is_spread_over_it():
    low, high = Around(double(1.0, 2.0)[:, None], 0.5, torch.float32).ends(torch.tensor([[False, True], [True, False]]))
    assert low.tolist() == [0.5, 1.5] and high.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_free_is_free_even_beside_what_is_wrong(dtype):
    found = Around(double(0.0, 0.0, 0.0), 0.1, dtype, torch.tensor([True, False, False]))
    assert found.outside(t(9.0, 9.0, 0.0, dtype=dtype)).tolist() == [False, True, False]


def test_results_beyond_the_dtype_are_infinite():
    found = Around(double(7e4, 1.0), 1.0, torch.float16)
    assert found.outside(t(INF, 1.0, dtype=torch.float16)).tolist() == [False, False]
    assert found.outside(t(65504.0, 1.0, dtype=torch.float16)).tolist() == [True, False]


# ---- products


def product(dtype=torch.float32, bias=None, block=512, precision=EXACT, channels=5, seed=0):
    chance = torch.Generator().manual_seed(seed)
    x, w = torch.randn(2, 3, 40, generator=chance).to(dtype), torch.randn(channels, 40, generator=chance).to(dtype)
    return x, w, Product(x.double(), w, bias, dtype, precision, block)


def ends_of(found, shape):
    return tuple(end.view(shape) for end in found.ends(torch.ones(shape, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_ends_of_a_product_are_its_bound_rounded(dtype):
    x, w, found = product(dtype)
    value = x.double() @ w.double().T
    slack = UA * (5 * math.sqrt(40) + 2.5) * x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=1) + TINY
    low, high = ends_of(found, (2, 3, 5))
    assert torch.equal(low, (value - slack).to(dtype)) and torch.equal(high, (value + slack).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "precision", "documented"),
    [
        (torch.float32, Precision(product_input=2.0**-10), 2.0**-10),
        (torch.float32, Precision(partial_sum=2.0**-4), 0.0),
        (torch.bfloat16, Precision(partial_sum=2.0**-4), 2.0**-4),
        (torch.bfloat16, Precision(product_input=2.0**-4), 0.0),
    ],
)
def test_documented_rounding_widens_by_twice_itself_times_the_sizes(dtype, precision, documented):
    x, w, found = product(dtype, precision=precision)
    value, sizes = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    slack = UA * (5 * math.sqrt(40) + 2.5) * x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=1) + TINY
    slack = slack + 2 * documented * sizes
    low, high = ends_of(found, (2, 3, 5))
    assert torch.equal(low, (value - slack).to(dtype)) and torch.equal(high, (value + slack).to(dtype))
    assert not found.outside(low).any() and not found.outside(high).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_fused_or_added_to_what_was_rounded(dtype):
    bias = t(100.0, -0.3, 1e-3, 7.0, 0.0, dtype=dtype)
    x, w, found = product(dtype, bias)
    b = bias.double()
    value = x.double() @ w.double().T
    slack = UA * (5 * math.sqrt(40) + 2.5) * x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=1) + TINY
    fused = [(value + b + s * (slack + UA * b.abs())).to(dtype) for s in (-1, 1)]
    twice = [((value + s * slack).to(dtype).double() + b).to(dtype) for s in (-1, 1)]
    low, high = ends_of(found, (2, 3, 5))
    assert torch.equal(low, torch.minimum(fused[0], twice[0])) and torch.equal(high, torch.maximum(fused[1], twice[1]))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 3, 4, 12])
def test_small_blocks_judge_every_channel_as_one_block_does(block, dtype, bias):
    chance = torch.Generator().manual_seed(1)
    shift = torch.randn(12, generator=chance).to(dtype) if bias else None
    x, w, whole = product(dtype, shift, channels=12)
    _, _, parts = product(dtype, shift, block, channels=12)
    got = torch.nn.functional.linear(x, w, shift)
    assert not parts.outside(got).any()
    for channel in (0, 3, 11):
        wrong = got.clone()
        wrong[1, 2, channel] += 1
        outside = parts.outside(wrong)
        assert outside.nonzero().tolist() == [[1, 2, channel]]
        assert [e.tolist() for e in parts.ends(outside)] == [e.tolist() for e in whole.ends(outside)]


def test_the_ends_are_in_the_order_of_a_boolean_index():
    x, w, found = product(block=2)
    where = torch.zeros(2, 3, 5, dtype=torch.bool)
    where[0, 1, 4] = where[0, 2, 0] = where[1, 0, 3] = True
    low, high = found.ends(where)
    value = (x.double() @ w.double().T)[where]
    assert low.shape == high.shape == (3,) and low.dtype == torch.float32
    assert torch.allclose((low.double() + high.double()) / 2, value, atol=1e-6) and bool((low < high).all())


def test_weights_may_come_widened():
    x, w, found = product(torch.bfloat16)
    wide = Product(x.double(), w.double(), None, torch.bfloat16, EXACT)
    got = (x.double() @ w.double().T).to(torch.bfloat16)
    got[0, 0, 0] *= 1.5
    assert torch.equal(found.outside(got), wide.outside(got)) and int(found.outside(got).sum()) == 1


@pytest.mark.parametrize(
    ("dtype", "precision", "shortcut"),
    [
        (torch.bfloat16, EXACT, True),
        (torch.float16, EXACT, True),
        (torch.float32, EXACT, False),
        (torch.float64, EXACT, False),
        (torch.bfloat16, Precision(partial_sum=2.0**-8), False),
        (torch.bfloat16, Precision(product_input=2.0**-10), True),
    ],
)
def test_the_hosts_own_product_counts_for_reduced_dtypes_whose_sums_are_not_rounded(monkeypatch, dtype, precision, shortcut):
    monkeypatch.setattr(rounding, "_is_exact", lambda: True)
    assert Product(torch.ones(1, 2).double(), torch.ones(1, 2), None, dtype, precision)._can_compare() is shortcut
    monkeypatch.setattr(rounding, "_is_exact", lambda: False)
    assert Product(torch.ones(1, 2).double(), torch.ones(1, 2), None, dtype, precision)._can_compare() is False


@pytest.mark.parametrize(("asked", "exact"), [("highest", True), ("high", True), ("medium", False)])
def test_an_older_torch_has_one_switch_for_all_devices(monkeypatch, asked, exact):
    monkeypatch.setattr(torch.backends, "mkldnn", object())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: asked)
    assert _is_exact() is exact


@pytest.mark.parametrize(("setting", "exact"), [("none", True), ("ieee", True), ("tf32", False), ("bf16", False)])
def test_a_newer_torch_has_a_switch_for_the_host(monkeypatch, setting, exact):
    class Mkldnn:
        class matmul:  # noqa: N801
            fp32_precision = setting

    monkeypatch.setattr(torch.backends, "mkldnn", Mkldnn)
    assert _is_exact() is exact


def test_a_value_that_the_host_rounds_otherwise_is_judged_by_its_interval():
    """1 + 2⁻⁸ lies half-way between two values of bfloat16: a sum that is a little off may become either."""
    x = torch.ones(1, 2).bfloat16()
    w = t(1.0, 2.0**-8, dtype=torch.bfloat16)[None]
    filler = torch.ones(63, 2).bfloat16()
    found = Product(x.double(), torch.cat([w, filler]), None, torch.bfloat16, EXACT)
    for first, wrong in ((1.0, False), (1.0078125, False), (1.015625, True), (0.99609375, True)):
        got = torch.full((1, 64), 2.0).bfloat16()
        got[0, 0] = first
        assert found.outside(got)[0].tolist() == [wrong, *[False] * 63]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("place", [0, 70, 127])
def test_a_doubtful_value_of_a_later_block_is_judged_by_its_own_weights(place, bias):
    """As above, in the second of two blocks: its neighbours in the first one have other weights and biases."""
    x, w = torch.ones(1, 2).bfloat16(), torch.ones(128, 2).bfloat16()
    w[place] = t(1.0, 2.0**-8, dtype=torch.bfloat16)
    shift = torch.full((128,), 64.0).bfloat16()
    shift[place] = 0.0
    found = Product(x.double(), w, shift if bias else None, torch.bfloat16, EXACT, 64)
    for value, wrong in ((1.0, False), (1.0078125, False), (1.015625, True), (2.0, True)):
        got = torch.full((1, 128), 66.0 if bias else 2.0).bfloat16()
        got[0, place] = value
        assert found.outside(got)[0].nonzero().flatten().tolist() == ([place] if wrong else [])


@pytest.mark.parametrize("few", [1, 2, 3, 64])
def test_few_and_many_doubtful_values_are_judged_alike(few):
    """Of 64 values up to two are judged one by one, more as a block."""
    x, w = torch.ones(1, 8).bfloat16(), torch.ones(64, 8).bfloat16()
    got = torch.full((1, 64), 8.0).bfloat16()
    got[0, :few] = 8.125
    found = Product(x.double(), w, None, torch.bfloat16, EXACT)
    assert found.outside(got)[0].tolist() == [i < few for i in range(64)]
    biased = Product(x.double(), w, torch.arange(64.0).bfloat16(), torch.bfloat16, EXACT)
    right = (8 + torch.arange(64.0))[None].bfloat16()
    wrong = right.clone()
    wrong[0, 64 - few :] += 1
    assert not biased.outside(right).any()
    assert biased.outside(wrong)[0].tolist() == [i >= 64 - few for i in range(64)]

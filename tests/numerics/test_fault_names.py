"""The name of a fault at the edges of every pattern, and in the order in which the patterns are asked for."""

import math

import pytest
import torch

from shaketable.numerics.classify import fault_class, unstable_class

WIDTH = {torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}


def values(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def named(clean, got, width=0.0):
    """The class of what differs, where `width` is allowed about every true value."""
    outside = ~(got == clean)
    true = clean.double()[outside]
    return fault_class(got, true - width, true + width, outside)


# ---- what is asked first


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32], ids=str)
def test_what_is_not_floating_has_no_pattern(dtype):
    got = torch.zeros(4, 4, dtype=dtype)
    outside = torch.ones(4, 4, dtype=torch.bool)
    assert fault_class(got, torch.ones(16, dtype=dtype), torch.ones(16, dtype=dtype), outside) == "wrong_values"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_told_before_zeros(bad):
    clean = values(20, 20)
    got = torch.zeros_like(clean)
    got[3, 4] = bad
    assert named(clean, got) == "not_finite"


def test_values_that_are_no_numbers_and_allowed_are_not_told():
    clean = values(20, 20)
    got = clean * 1.25
    got[3, 4] = math.nan
    outside = (got != clean) & ~got.isnan()
    assert fault_class(got, clean[outside], clean[outside], outside) == "gain"


@pytest.mark.parametrize(("zeros", "name"), [(89, "gain"), (90, "gain"), (91, "dead_zone"), (100, "dead_zone")])
def test_a_dead_zone_has_more_than_nine_zeros_in_ten_values(zeros, name):
    clean = values(10, 10).abs() + 1
    got = clean * 1.25
    got.view(-1)[:zeros] = 0
    found = named(clean, got)
    assert (found == "dead_zone") == (name == "dead_zone")


def test_zeros_that_are_right_make_no_dead_zone():
    clean = torch.zeros(10, 10)
    clean[0] = values(10) + 7
    got = clean.clone()
    got[0] *= 1.25
    assert named(clean, got) == "gain"


# ---- saturation


def test_one_value_is_clamped_where_it_is_smaller_and_the_largest_that_there_is():
    clean = torch.tensor([[1.0, -9.0, 3.0, 2.0]])
    assert named(clean, torch.tensor([[1.0, -3.0, 3.0, 2.0]])) == "saturation"
    assert named(clean, torch.tensor([[1.0, -2.0, 3.0, 2.0]])) != "saturation", "another one is larger"
    assert named(clean, torch.tensor([[1.0, -12.0, 3.0, 2.0]])) != "saturation", "it has grown"


@pytest.mark.parametrize(("smaller", "name"), [(20, True), (19, False), (10, False)])
def test_clamped_values_are_smaller_nearly_all(smaller, name):
    """Nineteen of twenty are 0.95, and more than that is asked for."""
    clean = torch.full((1, 20), 5.0)
    clean[0, smaller:] = 1.0
    got = torch.full((1, 20), 2.0)
    assert (named(clean, got) == "saturation") == name


def test_a_clamp_has_one_limit_per_row():
    """Three rows of four values: three limits are a clamp of each row, four are not."""
    clean = torch.full((3, 4), 9.0) + torch.arange(12.0).view(3, 4)
    by_row = torch.tensor([2.0, 3.0, 4.0])[:, None].expand(3, 4).contiguous()
    assert named(clean, by_row) == "saturation"
    more = by_row.clone()
    more[0, 0] = 1.5
    assert named(clean, more) != "saturation"


def test_of_few_values_half_have_to_share_a_limit():
    """Two values of four rows: one limit for both is a clamp, two limits are none."""
    clean = torch.full((4, 4), 1.0)
    clean[0, 0] = clean[1, 1] = 9.0
    shared, own = clean.clone(), clean.clone()
    shared[0, 0] = shared[1, 1] = 4.0
    own[0, 0], own[1, 1] = 4.0, 3.0
    assert named(clean, shared) == "saturation"
    assert named(clean, own) != "saturation"


def test_limits_of_either_sign_are_one_limit():
    clean = torch.tensor([[9.0, -8.0, 7.0, -6.0, 1.0]])
    assert named(clean, clean.clamp(-4, 4)) == "saturation"


# ---- one factor, one offset


def test_the_middle_of_what_was_allowed_is_what_was_expected():
    """Every value is allowed another range: only from its middle are all off by the same."""
    clean, width = values(30, 8).double() + 20, 8 * torch.rand(240, generator=torch.Generator().manual_seed(1)).double()
    outside = torch.ones(30, 8, dtype=torch.bool)
    low, high = clean.flatten() - width, clean.flatten() + width
    assert fault_class(clean + 50, low, high, outside) == "bias"
    assert fault_class(clean * 5, low, high, outside) == "gain"


@pytest.mark.parametrize("factor", [1.25, 0.5, -1.0, -3.0, 1.001])
def test_one_factor_is_a_gain(factor):
    clean = values(30, 8).double()
    assert named(clean, clean * factor) == "gain"


@pytest.mark.parametrize("offset", [0.75, -0.75, 30.0])
def test_one_offset_is_a_bias(offset):
    clean = values(30, 8).double()
    assert named(clean, clean + offset) == "bias"


def test_values_that_should_be_zero_do_not_hide_a_gain_or_a_bias():
    clean = values(30, 8).double()
    clean[:4] = 0
    assert named(clean, clean + 0.75) == "bias"
    outside = torch.ones(30, 8, dtype=torch.bool)
    assert fault_class(clean * 1.5, clean.flatten(), clean.flatten(), outside) == "gain"


@pytest.mark.parametrize(("spread", "name"), [(0.0, "gain"), (0.01, "gain"), (0.1, "wrong_values")])
def test_most_values_agree_on_a_factor_or_there_is_none(spread, name):
    """A factor of 1.5 that spreads: half a unit must be more than twenty times the spread."""
    clean = values(50, 50).double()
    factors = 1.5 + spread * values(50, 50, seed=1).double() / 2
    assert named(clean, clean * factors) == name


def test_less_than_half_of_the_values_may_be_otherwise_wrong():
    clean = values(40, 10).double()
    got = clean * 1.5
    got[:16] = values(16, 10, seed=3).double()
    assert named(clean, got) == "gain"
    got[:24] = values(24, 10, seed=3).double()
    assert named(clean, got) == "wrong_values"


def test_other_values_have_no_pattern():
    assert named(values(30, 8), values(30, 8, seed=5)) == "wrong_values"


@pytest.mark.parametrize(("got", "name"), [(0.0, "dead_zone"), (2.0, "saturation"), (math.nan, "not_finite"), (6.0, "gain")])
def test_a_single_number_without_dimension(got, name):
    assert named(torch.tensor(3.0), torch.tensor(got)) == name


# ---- bits


def with_bit(clean, bit):
    whole, _ = WIDTH[clean.dtype]
    return (clean.contiguous().view(whole) | (1 << bit)).view(clean.dtype)


def without_bits(clean, count):
    whole, _ = WIDTH[clean.dtype]
    return (clean.contiguous().view(whole) & ~((1 << count) - 1)).view(clean.dtype)


@pytest.mark.parametrize(("dtype", "bit"), [(d, b) for d, (_, n) in WIDTH.items() for b in (0, 1, n // 2, n - 1)], ids=str)
def test_any_mantissa_bit_may_be_stuck(dtype, bit):
    clean = values(40, 40, dtype=dtype)
    assert named(clean, with_bit(clean, bit)) == "stuck_bit"


@pytest.mark.parametrize(("dtype", "count"), [(d, c) for d, (_, n) in WIDTH.items() for c in sorted({1, 2, n // 2})], ids=str)
def test_any_number_of_low_bits_may_be_cut_off(dtype, count):
    clean = values(40, 40, dtype=dtype)
    assert named(clean, without_bits(clean, count)) == "truncation"


def test_a_stuck_bit_is_told_before_low_bits_that_are_clear():
    clean = without_bits(values(40, 40), 4)
    assert named(clean, with_bit(clean, 10)) == "stuck_bit"


@pytest.mark.parametrize("dtype", WIDTH, ids=str)
def test_exponent_and_sign_are_no_mantissa(dtype):
    """Values from 1 to 1.9 have the same exponent bits: all but one of them are set in every value."""
    clean = (values(40, 40, seed=1).abs() % 0.9 + 1).to(dtype)
    got = (values(40, 40, seed=2).abs() % 0.9 + 1).to(dtype)
    assert named(clean, got) == "wrong_values"
    assert named(-clean, -got) == "wrong_values"


@pytest.mark.parametrize(("count", "name"), [(23, "bias"), (24, "truncation"), (25, "truncation")])
def test_bits_are_read_from_two_dozen_values(count, name):
    clean = torch.arange(1.0, count + 1)[:, None]
    assert named(clean, clean + 0.5) == name


def test_zeros_have_no_bits():
    """Half of the faulty channel is zero and should be: the bit is set in all others."""
    clean = values(60, 4)
    clean[:30, 1] = 0
    got = clean.clone()
    got[30:, 1] = with_bit(clean[30:, 1], 20)
    assert named(clean, got) == "stuck_bit"


def test_channels_without_any_wrong_value_are_not_read():
    clean = values(60, 4)
    clean[:, 0] = without_bits(clean[:, 0], 8)
    got = clean.clone()
    got[:, 2] *= 1.1
    assert named(clean, got) == "gain"


def test_one_value_with_the_bit_clear_is_enough_to_clear_the_suspicion():
    clean = values(60, 1)
    got = with_bit(clean, 20)
    got[7] = without_bits(got[7], 23)
    assert named(clean, got) != "stuck_bit"


def test_a_double_has_no_bits_to_read():
    clean = values(40, 40).double()
    got = clean.float().double() * 1.25
    assert named(clean, got) == "gain"


# ---- from call to call


@pytest.mark.parametrize(("changed", "name"), [(0, "spike"), (1, "spike"), (49, "spike"), (50, "noise"), (1000, "noise")])
def test_a_spike_changes_less_than_a_twentieth(changed, name):
    a, b = torch.zeros(10, 100), torch.zeros(10, 100)
    b.view(-1)[:changed] = 1
    assert unstable_class(a, b) == name

"""SRDD number by number: every statistic and every threshold of the verdict on values small enough to compute by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shaketable.locate.srdd import (
    LayerStatistics,
    _robust_z,
    dc_input,
    gain,
    layer_statistics,
    probe_input,
    srdd_verdict,
)

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
USUAL = LayerStatistics(gain=1.0, min_gain=0.9, kurtosis=97.0, instability=0.0, pile_up=0.001, distinct=1000)


def row(*values: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).reshape(1, 1, -1)


def of_outputs(*outputs: torch.Tensor) -> LayerStatistics:
    """Statistics whose input and probes say nothing."""
    x = torch.zeros_like(outputs[0])
    return layer_statistics(x, list(outputs), x, x, x, x)


def of_dc(x, dc_x, y, dc_y) -> float:
    return layer_statistics(x, [y], x, y, dc_x, dc_y).min_gain


def layers(name: str, values) -> list[LayerStatistics]:
    """Layers that are alike in all but one number."""
    return [replace(USUAL, **{name: value}) for value in values]


# ---- the inputs


def test_the_probe_is_the_generators_noise_times_the_scale_and_the_std():
    x = row(1.0, 3.0, 1.0, 3.0)  # a std of 1
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(11))
    assert torch.allclose(probe_input(x, 11, 0.5), x + 0.5 * noise, atol=1e-6)
    assert torch.allclose(probe_input(x, 11), x + 0.1 * noise, atol=1e-6)


def test_the_std_of_the_probe_is_that_of_the_finite_values():
    x = row(1.0, 3.0, INF, 1.0, 3.0, NAN)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    finite = [0, 1, 3, 4]
    assert torch.allclose(probe_input(x, 3)[..., finite], (x + 0.1 * noise)[..., finite], atol=1e-6)
    assert torch.allclose(dc_input(x)[..., finite], x[..., finite] + 0.1)
    assert dc_input(x)[0, 0, 2] == INF and bool(dc_input(x)[0, 0, 5].isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_inputs_keep_shape_and_dtype_and_the_given_tensor(dtype):
    x = row(1.0, 3.0, 5.0, -7.0, dtype=dtype)
    kept = x.clone()
    for made in (probe_input(x, 0), dc_input(x)):
        assert made.dtype == dtype and made.shape == x.shape and made.data_ptr() != x.data_ptr()
    assert torch.equal(x, kept)


def test_the_inputs_are_outside_of_any_graph():
    x = row(1.0, 3.0).requires_grad_()
    assert not probe_input(x, 0).requires_grad and not dc_input(x).requires_grad


@pytest.mark.parametrize(("scale", "shift"), [(None, 0.2), (0.5, 1.0), (2.0, 4.0)])
def test_the_constant_is_the_scale_times_the_std_of_all_values(scale, shift):
    x = row(0.0, 4.0, 0.0, 4.0)  # a std of 2, where one with n - 1 has 2.31
    found = dc_input(x) if scale is None else dc_input(x, scale)
    assert torch.allclose(found - x, torch.full_like(x, shift))


def test_a_constant_is_added_before_it_is_rounded():
    """256 and 2 in bfloat16: a shift of 127 · 0.02 = 2.54 makes 258.54, which rounds to 258, and not to 256."""
    x = row(256.0, 2.0, dtype=torch.bfloat16)
    assert dc_input(x, 0.02).tolist() == [[[258.0, 4.53125]]]


# ---- gain


def test_the_gain_is_a_ratio_of_stds_about_their_means():
    x, probed_x = row(0.0, 0.0, 0.0, 0.0), row(1.0, -1.0, 1.0, -1.0)
    y = row(5.0, 6.0, 7.0, 8.0)
    assert gain(x, y, probed_x, y + row(3.0, -3.0, 3.0, -3.0)) == pytest.approx(3.0)
    assert gain(x, y, probed_x, y + 100) == 0.0, "a shift of all values is no answer to the noise"
    assert gain(x, y, probed_x + 100, y + row(3.0, -3.0, 3.0, -3.0)) == pytest.approx(3.0, rel=1e-5)


def test_a_probe_that_was_rounded_away_has_no_gain():
    x, y = row(1.0, 2.0), row(1.0, 2.0)
    assert math.isnan(gain(x, y, x, y + row(0.0, 1.0)))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_values_that_are_no_numbers_are_left_out_of_the_gain(bad):
    x, probed_x = row(0.0, 0.0, 0.0), row(1.0, -1.0, 0.0)
    y, probed_y = row(0.0, 0.0, bad), row(2.0, -2.0, 7.0)
    # std of ±2 is 2; that of (1, -1, 0) is √(2/3)
    assert gain(x, y, probed_x, probed_y) == pytest.approx(2 / math.sqrt(2 / 3))
    assert gain(x, row(0.0, 0.0, 7.0), probed_x, row(2.0, -2.0, bad)) == pytest.approx(2 / math.sqrt(2 / 3))
    assert math.isnan(gain(x, row(bad, bad, bad), probed_x, probed_y))


def test_the_gain_of_a_layer_is_that_of_its_first_answer():
    x, probed = row(0.0, 0.0), row(1.0, -1.0)
    found = layer_statistics(x, [row(0.0, 0.0), row(50.0, -9.0)], probed, row(4.0, -4.0), x, x)
    assert found.gain == pytest.approx(4.0)


def test_huge_reduced_values_do_not_overflow():
    x, probed = row(0.0, 0.0, dtype=torch.float16), row(60000.0, -60000.0, dtype=torch.float16)
    assert gain(x, x, probed, probed) == 1.0


# ---- the least answer


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)])
def test_the_least_answer_is_the_0_001_quantile(count, rank):
    """The answers are 1, 2, …, n, so the value is the rank: 1 + ⌊0.001(n − 1)⌋."""
    x, response = torch.zeros(1, 1, count), torch.arange(1.0, count + 1).flip(0).reshape(1, 1, -1)
    assert of_dc(x, x + 1, x, response) == pytest.approx(rank)


def test_the_least_answer_has_no_sign_and_is_over_the_median_of_the_constants():
    x, y = torch.zeros(1, 1, 5), torch.zeros(1, 1, 5)
    assert of_dc(x, row(0.5, 0.5, 0.5, 0.0, 0.0), y, row(-3.0, -2.0, 4.0, 5.0, -6.0)) == pytest.approx(4.0)
    assert of_dc(x, row(-0.5, -0.5, -0.5, -0.5, 90.0), y, row(-3.0, -2.0, 4.0, 5.0, -6.0)) == pytest.approx(4.0)


def test_the_least_answer_needs_a_constant_and_an_answer():
    x, y = torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)
    assert math.isnan(of_dc(x, x, y, y + 1)), "the shift was rounded away"
    assert math.isnan(of_dc(x, x + 1, y, y + NAN))
    assert math.isnan(of_dc(x, x + NAN, y, y + 1))
    assert of_dc(x, x + 1, y, row(2.0, NAN, INF)) == pytest.approx(2.0)


# ---- kurtosis, instability, pile-up, different values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((-1.0, 1.0), -2.0),
        ((-1.0, 0.0, 1.0), -1.5),
        ((0.0, 0.0, 0.0, 4.0), 84 / 36 - 3),  # deviations −1, −1, −1, 3: m2 = 3, m4 = 21
        ((7.0, 9.0), -2.0),
        ((-5e4, -5e4, 5e4, 5e4), -2.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_kurtosis_by_hand_at_any_scale(values, expected, scale):
    assert of_outputs(row(*values) * scale).kurtosis == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("values", [(4.0,), (4.0, 4.0), (NAN, INF), (NAN, 4.0, INF, 4.0)])
def test_values_without_spread_have_no_kurtosis(values):
    assert math.isnan(of_outputs(row(*values)).kurtosis)


def test_two_answers_are_as_far_apart_as_their_std():
    """Differences 0 and 2 have a std of √2 (n − 1 = 1 degree of freedom); the first answer has an rms of 5."""
    assert of_outputs(row(5.0, -5.0), row(7.0, -5.0)).instability == pytest.approx(math.sqrt(2 / 2) / 5)
    assert of_outputs(row(5.0, -5.0), row(7.0, -3.0)).instability == pytest.approx(math.sqrt(2) / 5)
    assert of_outputs(row(3.0), row(5.0), row(7.0)).instability == pytest.approx(2 / 3)
    assert of_outputs(row(3.0), row(3.0), row(6.0)).instability == pytest.approx(math.sqrt(3) / 3), "the last one counts too"


def test_what_is_no_number_in_any_answer_says_nothing_of_stability():
    assert of_outputs(row(5.0, NAN), row(7.0, NAN)).instability == pytest.approx(math.sqrt(2) / 5)
    assert of_outputs(row(5.0, 100.0), row(7.0, INF)).instability == pytest.approx(math.sqrt(2) / 5)
    assert of_outputs(row(5.0, NAN), row(5.0, NAN)).instability == 0.0
    assert math.isnan(of_outputs(row(NAN, NAN), row(1.0, 2.0)).instability)


def test_answers_about_nothing_have_no_relative_instability():
    assert math.isnan(of_outputs(row(0.0, 0.0), row(1.0, 0.0)).instability)
    assert of_outputs(row(0.0, 0.0), row(0.0, 0.0)).instability == 0.0


def test_one_answer_that_repeats_itself_is_no_repeat():
    assert math.isnan(of_outputs(row(1.0, 2.0)).instability)


def test_answers_of_reduced_dtypes_are_subtracted_in_full():
    a, b = row(60000.0, dtype=torch.float16), row(-60000.0, dtype=torch.float16)
    assert of_outputs(a, b).instability == pytest.approx(120000 / math.sqrt(2) / 60000)


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ((1.0, 2.0, 3.0, 4.0), 0.5),
        ((1.0, 1.0, 3.0, 4.0), 0.75),
        ((1.0, 2.0, 4.0, 4.0), 0.75),
        ((-4.0, 1.0, 1.0, 3.0, 2.0), 0.4),
        ((2.0, 2.0), 1.0),
        ((INF, 1.0, 2.0, 3.0, 4.0, NAN), 0.5),
    ],
)
def test_pile_up_is_the_share_at_the_ends(values, share):
    assert of_outputs(row(*values)).pile_up == pytest.approx(share)


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ((3.0, 1.0, 2.0), 3),
        ((3.0, 1.0, 3.0, 1.0), 2),
        ((0.0, -0.0), 1),
        ((5.0,), 1),
        ((NAN, NAN), 0),
        ((1.0, INF, -INF, NAN, 2.0), 2),
        ((1.0, INF), 1),
    ],
)
def test_different_values_are_counted_once_each(values, count):
    assert of_outputs(row(*values)).distinct == count


def test_nothing_at_all_has_no_statistics():
    found = of_outputs(torch.empty(1, 0, 4), torch.empty(1, 0, 4))
    assert found.distinct == 0 and found.instability == 0.0
    assert all(math.isnan(v) for v in (found.gain, found.min_gain, found.kurtosis, found.pile_up))


def test_every_number_has_its_own_name():
    x, probed, dc = row(0.0, 0.0, 0.0, 0.0), row(1.0, -1.0, 1.0, -1.0), row(0.5, 0.5, 0.5, 0.5)
    y = row(3.0, -3.0, 1.0, -1.0)
    other = y + row(2.0, 2.0, 2.0, 2.0)
    found = layer_statistics(x, [y, other], probed, y + 2 * probed, dc, y + row(1.5, 2.0, 2.5, -3.0))
    assert found.as_dict() == {
        "gain": pytest.approx(2.0),
        "min_gain": pytest.approx(3.0),
        "kurtosis": pytest.approx(41 / 25 - 3),
        "instability": pytest.approx(math.sqrt(2) / math.sqrt(5)),
        "pile_up": 0.5,
        "distinct": 4,
    }


# ---- z


def test_z_is_over_the_median_and_the_mad():
    found = _robust_z(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert found == pytest.approx(np.array([-2.0, -1.0, 0.0, 1.0, 97.0]) / 1.4826)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_spread_of_zero_is_taken_as_a_hundredth_of_the_median(sign):
    found = _robust_z(sign * np.array([5.0, 5.0, 5.0, 6.0]))
    assert found == pytest.approx(sign * np.array([0, 0, 0, 1 / (1.4826 * 0.05)]))


def test_values_about_zero_have_a_least_spread():
    assert _robust_z(np.array([0.0, 0.0, 0.0, 3e-6])) == pytest.approx([0, 0, 0, 3 / 1.4826])
    assert _robust_z(np.array([0.0, 0.0, 0.0, 3e-6]), tiny=1e-9) == pytest.approx([0, 0, 0, 3000 / 1.4826])


def test_what_is_no_number_stays_none_and_does_not_count():
    found = _robust_z(np.array([1.0, NAN, 2.0, 3.0, INF, 4.0, 100.0]))
    assert found[[0, 2, 3, 5, 6]] == pytest.approx(np.array([-2.0, -1.0, 0.0, 1.0, 97.0]) / 1.4826)
    assert math.isnan(found[1]) and found[4] == INF
    assert _robust_z(np.array([NAN, NAN])).tolist() == [0.0, 0.0]


# ---- the verdict


def test_edges_are_changes_from_the_layer_before():
    found = srdd_verdict(
        [replace(USUAL, kurtosis=k, instability=i) for k, i in ((5.0, 0.25), (1.0, 0.5), (29.0, 0.375), (-2.0, 0.375))]
    )
    assert found["edges"]["kurtosis"] == pytest.approx([0.0, math.log(4 / 8), math.log(32 / 4), math.log(1 / 32)])
    assert found["edges"]["instability"] == [0.25, 0.25, -0.125, 0.0]


def test_a_layer_without_kurtosis_or_instability_has_no_edge():
    found = srdd_verdict(layers("kurtosis", [5.0, NAN, 29.0, 61.0]))
    assert found["edges"]["kurtosis"] == pytest.approx([0.0, 0.0, 0.0, math.log(2)])
    found = srdd_verdict(layers("instability", [NAN, 0.25, NAN]))
    assert found["edges"]["instability"] == [0.0, 0.25, -0.25]


def test_the_peak_of_a_flat_distribution_is_no_less_than_one():
    found = srdd_verdict(layers("kurtosis", [-1.0, -2.75, -1.0]))
    assert found["edges"]["kurtosis"] == pytest.approx([0.0, -math.log(2), math.log(2)])


@pytest.mark.parametrize(
    ("values", "everywhere"),
    [
        ([0.01, 0.05, 0.01], True),
        ([0.01, 0.051, 0.01], False),
        ([0.01, 0.01], True),
        ([0.01], True),
        ([0.0, 0.01, 0.01], False),
        ([NAN, 0.01, 0.01], False),
        ([0.0, 0.0], False),
        ([], False),
    ],
)
def test_an_anomaly_is_everywhere_when_no_layer_is_above_five_times_the_quietest(values, everywhere):
    found = srdd_verdict(layers("instability", values))
    assert found["global_anomaly"] is everywhere
    if everywhere:
        assert (found["blames"], found["why"]) == (None, "every layer is unstable, none much more than the others")


def test_instability_everywhere_keeps_every_other_test_silent():
    dead = [replace(USUAL, instability=0.01, gain=g, pile_up=p) for g, p in ((1.0, 0.001), (0.0, 0.5), (1.0, 0.001))]
    assert srdd_verdict(dead)["blames"] is None
    quiet = [replace(s, instability=0.0) for s in dead]
    assert srdd_verdict(quiet)["blames"] == 1


def test_the_first_layer_that_rises_is_blamed_in_words():
    found = srdd_verdict(layers("instability", [0.0, 0.0, 0.0123, 0.0, 0.5, 0.0]))
    assert (found["blames"], found["why"]) == (2, "instability rises to 0.012 at layer 2")
    assert found["global_anomaly"] is False


def test_a_rise_below_five_times_the_quietest_is_passed_over():
    """Layer 2 rises by far more than is usual, and to no more than 4.9 times the quietest; layer 5 goes above."""
    values = [1.0, 1.0, 4.9, 4.9, 4.9, 5.2, 5.2, 5.2, 5.2]
    assert srdd_verdict(layers("instability", [v / 100 for v in values]))["blames"] == 5


def test_a_layer_that_is_unstable_without_a_rise_is_not_the_edge():
    """Every layer adds the same: no rise stands out, though the later layers are far above the first."""
    found = srdd_verdict(layers("instability", [0.01 * i for i in range(1, 9)]))
    assert (found["blames"], found["global_anomaly"], found["why"]) == (None, False, "nothing stands out")


@pytest.mark.parametrize(("gain", "blamed"), [(0.0, True), (0.099, True), (0.1, False), (0.2, False)])
def test_a_gain_below_a_tenth_is_dead_whatever_the_others_have(gain, blamed):
    """Gains this uneven have no outlier: nothing below zero is two spreads away."""
    found = srdd_verdict(layers("gain", [0.3, 2.0, gain, 1.0, 4.0]))
    assert found["blames"] == (2 if blamed else None)
    if blamed:
        assert found["why"] == f"gain is {gain:.2g} at layer 2, the median is 1"


@pytest.mark.parametrize(("gain", "blamed"), [(0.79, True), (0.81, False), (1.5, False)])
def test_an_outlier_is_blamed_below_eight_tenths_of_the_median(gain, blamed):
    found = srdd_verdict(layers("gain", [1.0, 1.0, 1.0, gain, 1.0]))
    assert found["blames"] == (3 if blamed else None)


def test_eight_tenths_are_of_the_median_and_not_of_one():
    assert srdd_verdict(layers("gain", [2.0, 2.0, 2.0, 1.5, 2.0]))["blames"] == 3
    assert srdd_verdict(layers("gain", [0.5, 0.5, 0.5, 0.45, 0.5]))["blames"] is None


def test_a_gain_that_is_low_among_uneven_ones_is_no_outlier():
    assert srdd_verdict(layers("gain", [0.5, 1.5, 1.0, 0.75, 1.25]))["blames"] is None


def test_the_lowest_of_two_low_gains_is_blamed_and_a_missing_one_is_passed_over():
    found = srdd_verdict(layers("gain", [1.0, NAN, 0.05, 0.01, 1.0, NAN, 1.0]))
    assert (found["blames"], found["why"]) == (3, "gain is 0.01 at layer 3, the median is 1")


def test_a_fall_of_the_kurtosis_is_blamed_in_words():
    found = srdd_verdict(layers("kurtosis", [97.0, 97.0, 97.0, 22.0, 22.0, 97.0]))
    assert (found["blames"], found["why"]) == (3, "kurtosis falls by a factor 4 at layer 3")


def test_the_sharpest_of_two_falls_is_blamed():
    assert srdd_verdict(layers("kurtosis", [97.0, 47.0, 47.0, 2.0, 2.0, 2.0, 2.0]))["blames"] == 3
    assert srdd_verdict(layers("kurtosis", [997.0, 47.0, 47.0, 22.0, 22.0, 22.0, 22.0]))["blames"] == 1


def test_a_rise_of_the_kurtosis_blames_nobody():
    assert srdd_verdict(layers("kurtosis", [7.0, 7.0, 997.0, 997.0, 997.0]))["blames"] is None


def test_a_fall_that_is_as_large_as_the_others_blames_nobody():
    assert srdd_verdict(layers("kurtosis", [1e6, 1e5, 1e4, 1e3, 1e2]))["blames"] is None


def test_a_layer_that_rises_less_than_the_others_has_not_fallen():
    """All logarithms rise by 1 but that of layer 3: the lowest edge is an outlier, and no fall."""
    peaks = np.exp(np.cumsum([1.0, 1.0, 1.0, 0.2, 1.0, 1.0, 1.0]))
    found = srdd_verdict(layers("kurtosis", list(peaks - 3)))
    assert found["edges"]["kurtosis"][3] == pytest.approx(0.2) and found["blames"] is None


@pytest.mark.parametrize(("share", "blamed"), [(0.0101, True), (0.0099, False)])
def test_a_pile_is_ten_times_the_median(share, blamed):
    found = srdd_verdict(layers("pile_up", [0.001, 0.001, share, 0.001, 0.001]))
    assert found["blames"] == (2 if blamed else None)
    if blamed:
        assert found["why"] == "1.01% of the values of layer 2 sit at the largest or smallest one"


def test_the_largest_pile_is_blamed_and_a_missing_one_passed_over():
    assert srdd_verdict(layers("pile_up", [0.001, 0.2, NAN, 0.5, 0.001, 0.001, 0.001]))["blames"] == 3


def test_a_pile_among_uneven_ones_is_no_outlier():
    """Eleven times the median, and no two of the least spreads above it."""
    assert srdd_verdict(layers("pile_up", [2e-7, 2e-7, 2e-7, 22e-7, 2e-7]))["blames"] is None


def test_the_order_of_the_tests():
    """Each layer has another trouble: unstable at 4, dead at 3, flat at 2, piled up at 1."""
    healthy = [USUAL] * 7
    troubles = {1: {"pile_up": 0.5}, 2: {"kurtosis": 1.0}, 3: {"gain": 0.0}, 4: {"instability": 0.1}}
    for worst in (1, 2, 3, 4):
        some = [replace(s, **troubles[i]) if 0 < i <= worst else s for i, s in enumerate(healthy)]
        assert srdd_verdict(some)["blames"] == worst


def test_layer_zero_may_be_blamed_for_all_but_a_fall():
    for trouble in ({"pile_up": 0.5}, {"gain": 0.0}, {"instability": 0.1}):
        assert srdd_verdict([replace(USUAL, **trouble), *[USUAL] * 5])["blames"] == 0
    assert srdd_verdict([replace(USUAL, kurtosis=1.0), *[USUAL] * 5])["blames"] is None

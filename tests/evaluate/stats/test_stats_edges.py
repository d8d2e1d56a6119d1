"""The statistics at their edges: words, boundaries and defaults, held against scipy, plain formulas and numbers by hand."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.stats import recovered as shares
from shaketable.evaluate.stats.comparison import Comparison, Interval, corrected, holm, points
from shaketable.evaluate.stats.crossed_effects import MeanSquares
from shaketable.evaluate.stats.power import (
    POWER,
    detectable,
    expected_discordance,
    mcnemar_detectable,
    mcnemar_power,
    sign_flip_detectable,
    t_detectable,
)
from shaketable.evaluate.stats.recovered import Recovered, share_recovered
from shaketable.evaluate.stats.tests import (
    ONE_RUN,
    bootstrap,
    mcnemar,
    over_seeds,
    paired,
    paired_interval,
    sign_flip,
    wilson,
)


def comparison(**changes):
    fields = {"difference": 0.031, "interval": Interval(-0.01, 0.072), "p": 0.14, "method": "exact McNemar"}
    fields |= {"over": "paired over 9 problems", "detectable": 0.058, "problems": 9, "seeds": (4, 4)}
    return Comparison(**fields | changes)


# ---- what a comparison says


@pytest.mark.parametrize(("level", "shown"), [(0.95, "95"), (0.9, "90"), (0.99, "99"), (0.975, "97.5"), (0.5, "50")])
def test_the_sentence_names_the_level_of_its_interval(level, shown):
    assert f"({shown} % CI −1.0 to +7.2, p = 0.14," in comparison(level=level).sentence()


@pytest.mark.parametrize(
    ("seeds", "design"), [((1, 1), "this n"), ((1, 3), "this n and these seeds"), ((3, 1), "this n and these seeds")]
)
@pytest.mark.parametrize(
    ("seen", "words"), [(None, "no difference can be seen"), (0.0234, "a difference of 2.3 points can be seen")]
)
def test_the_sentence_names_the_design_that_could_have_seen_it(seeds, design, seen, words):
    assert comparison(seeds=seeds, detectable=seen).sentence().endswith(f": not distinguishable; with {design} {words}")


@pytest.mark.parametrize(
    ("p", "shown"),
    [(0.001, "p = 0.001"), (0.00099, "p < 0.001"), (0.0, "p < 0.001"), (0.0012, "p = 0.0012"), (1.0, "p = 1"), (0.126, "p = 0.13")],
)  # fmt: skip
def test_a_p_is_told_with_two_digits_and_below_a_thousandth_as_that(p, shown):
    assert f", {shown}, paired over" in comparison(p=p).sentence()
    assert f", p = 0.14, after Holm {shown}, paired over" in comparison(adjusted=p).sentence()


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(0.0, "0.0"), (0.0004, "0.0"), (-0.0004, "0.0"), (0.0006, "+0.1"), (-0.0006, "−0.1"), (1.0, "+100.0"), (-0.25, "−25.0")],
)
def test_points_have_a_sign_and_one_decimal(fraction, shown):
    assert points(fraction) == shown


def test_a_difference_that_can_be_told_from_none_says_nothing_of_its_reach():
    assert comparison(p=0.01).sentence() == (
        "+3.1 points (95 % CI −1.0 to +7.2, p = 0.01, paired over 9 problems): distinguishable from none"
    )
    assert comparison(note="so far").sentence().endswith("can be seen; so far")


@pytest.mark.parametrize(("p", "adjusted", "found"), [(0.01, None, True), (0.01, 0.2, False), (0.2, 0.01, True), (0.2, None, False)])  # fmt: skip
def test_the_corrected_p_decides_where_there_is_one(p, adjusted, found):
    one = comparison(p=p, adjusted=adjusted)
    assert one.distinguishable is found and one.to_dict()["distinguishable"] is found
    assert ("distinguishable from none" in one.sentence()) is found


def test_everything_about_a_comparison_goes_into_json_under_its_own_name():
    one = comparison(adjusted=0.28, level=0.9, note="a note", seeds=(2, 5), detectable=None)
    assert one.to_dict() == {
        "difference": 0.031, "interval": {"low": -0.01, "high": 0.072}, "level": 0.9, "p": 0.14, "adjusted": 0.28,
        "distinguishable": False, "method": "exact McNemar", "over": "paired over 9 problems", "problems": 9, "seeds": [2, 5],
        "detectable": None, "note": "a note", "sentence": one.sentence(),
    }  # fmt: skip
    assert (comparison().level, comparison().note, comparison().adjusted) == (0.95, "", None)


def test_holm_by_hand_with_ties_and_the_ends():
    assert holm([]) == [] and holm([0.5]) == [0.5]
    assert holm([0.01, 0.01, 0.04]) == pytest.approx([0.03, 0.03, 0.04])
    assert holm([0.0, 1.0, 0.4]) == pytest.approx([0.0, 1.0, 0.8])
    assert holm([0.03, 0.02]) == pytest.approx([0.04, 0.04]), "never smaller than the one before it"
    assert holm([0.6, 0.7, 0.9]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("ps", "bad"), [([0.5, 1.5], "1.5"), ([-0.25, 0.5], "-0.25"), ([0.1, float("nan")], "nan")])
def test_holm_names_the_one_that_is_no_p_value(ps, bad):
    with pytest.raises(ShaketableError, match=f"^a p-value lies between 0 and 1, not {bad}$"):
        holm(ps)


def test_a_family_keeps_its_order_and_all_but_the_corrected_p():
    first, second = comparison(p=0.04, difference=0.5), comparison(p=0.01, note="x")
    found = corrected([first, second])
    assert [c.adjusted for c in found] == pytest.approx([0.04, 0.02])
    assert [(c.p, c.difference, c.note) for c in found] == [(0.04, 0.5, ""), (0.01, 0.031, "x")]
    assert first.adjusted is None and corrected([]) == []


# ---- crossed effects


def test_mean_squares_of_a_small_table_by_hand():
    """Rows 1 and 3 on average, columns 1, 2 and 3, and ±1 left over in the corners."""
    table = np.array([[-1.0, 1.0, 3.0], [3.0, 3.0, 3.0]])
    found = MeanSquares.of(table)
    assert (found.by_seed, found.by_problem, found.rest) == pytest.approx((6.0, 2.0, 2.0))
    assert (found.seeds, found.problems) == (2, 3)
    assert found.variance == pytest.approx(6 / 6) and found.seed_sd == pytest.approx(math.sqrt(4 / 3))
    assert found.freedom == 1.0, "36 / (36 / 1 + 4 / 2 + 4 / 2) is less than the smaller side has"


def test_freedom_is_never_below_the_smaller_side_whichever_that_is():
    wide = MeanSquares(by_seed=1.0, by_problem=1.0, rest=1.0, seeds=3, problems=40)
    tall = MeanSquares(by_seed=1.0, by_problem=1.0, rest=1.0, seeds=40, problems=3)
    assert wide.freedom == tall.freedom == 2.0
    assert MeanSquares(by_seed=0.0, by_problem=5.0, rest=0.0, seeds=40, problems=3).freedom == pytest.approx(2.0)
    assert MeanSquares(by_seed=5.0, by_problem=0.0, rest=0.0, seeds=40, problems=3).freedom == pytest.approx(39.0)


def test_a_negative_component_of_problems_is_none():
    found = MeanSquares(by_seed=20.0, by_problem=0.5, rest=2.0, seeds=40, problems=3)
    assert found.variance == pytest.approx(20 / 120)
    assert found.freedom == pytest.approx(400 / (400 / 39 + 4 / 2 + 4 / 78))


# ---- what could have been seen


def test_the_power_asked_for_by_default_is_four_in_five():
    assert POWER == 0.8
    assert mcnemar_power(100, 0.3, mcnemar_detectable(100, 0.3)) == pytest.approx(0.8, abs=1e-4)
    assert t_detectable(0.02, 9) == t_detectable(0.02, 9, level=0.95, power=0.8)


def test_a_planned_comparison_takes_no_spread_of_seeds_and_half_of_the_disagreement_as_shared_by_default():
    squares = MeanSquares.expected(4, 100, seed=0.0, problem=0.1, rest=0.1)
    wanted = t_detectable(math.sqrt(squares.variance), squares.freedom)
    assert detectable(100, discordance=0.2, seeds=4) == wanted
    assert detectable(100, discordance=0.2, seeds=4, seed_sd=0.0, shared=0.5, level=0.95, power=0.8) == wanted


def test_one_seed_has_no_spread_of_seeds():
    assert detectable(100, discordance=0.2, seed_sd=0.5, shared=1.0) == mcnemar_detectable(100, 0.2)
    assert detectable(1) is None, "one problem and one run show nothing"


@pytest.mark.parametrize("level", [0.9, 0.99])
def test_a_planned_comparison_of_one_run_is_at_its_level(level):
    assert detectable(120, discordance=0.2, level=level) == mcnemar_detectable(120, 0.2, level=level)
    assert detectable(120, discordance=0.2, level=level, power=0.6) == mcnemar_detectable(120, 0.2, level=level, power=0.6)


def test_with_one_problem_the_spread_of_the_seeds_alone_counts():
    found = detectable(1, seeds=4, seed_sd=0.01)
    edge = stats.t.isf(0.025, 3)
    assert stats.nct.sf(edge, 3, found / (0.01 / 2)) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize(("freedom", "level"), [(1, 0.95), (1, 0.99), (2, 0.999), (3, 0.9999), (400, 0.95)])
def test_few_degrees_of_freedom_and_high_levels_have_an_answer(freedom, level):
    found = t_detectable(1e-4, freedom, level=level)
    assert stats.nct.sf(stats.t.isf((1 - level) / 2, freedom), freedom, found / 1e-4) == pytest.approx(0.8, abs=1e-3)


def test_a_difference_of_exactly_the_disagreement_is_the_largest_that_there_can_be():
    """Where all problems that differ go one way, more must differ: ψ grows with δ."""
    found = mcnemar_detectable(50, 0.01)
    assert found > 0.01 and mcnemar_power(50, found, found) == pytest.approx(0.8, abs=1e-4)


def test_a_difference_in_either_direction_is_seen_alike():
    assert mcnemar_power(40, 0.4, 0.2) == pytest.approx(mcnemar_power(40, 0.4, -0.2))
    assert mcnemar_power(40, 0.4, 0.2, level=0.99) < mcnemar_power(40, 0.4, 0.2)


def test_six_of_six_at_five_percent_and_eight_of_eight_at_one_percent_are_the_least():
    assert mcnemar_power(6, 1.0, 1.0) == pytest.approx(1.0) and mcnemar_power(5, 1.0, 1.0) == 0.0
    assert mcnemar_power(8, 1.0, 1.0, level=0.99) == pytest.approx(1.0) and mcnemar_power(7, 1.0, 1.0, level=0.99) == 0.0
    assert mcnemar_detectable(7, 0.5, level=0.99) is None and mcnemar_detectable(8, 0.5, level=0.99) is not None


@pytest.mark.parametrize(("level", "power"), [(0.95, 0.8), (0.8, 0.8), (0.95, 0.5), (0.99, 0.9)])
def test_the_floor_of_a_sign_flip_is_at_its_level_and_its_power(level, power):
    d = np.zeros(100)
    d[:3] = 0.5, -0.5, 0.2
    floor = mcnemar_detectable(100, 0.0, level=level, power=power) * 0.4
    assert floor > t_detectable(d.std(ddof=1) / 10, 99, level=level, power=power)
    assert sign_flip_detectable(d, level=level, power=power) == pytest.approx(floor)


def test_a_sign_flip_whose_spread_hides_everything_sees_nothing():
    wide = np.array([1.0, -1.0] * 3)
    assert mcnemar_detectable(6, 0.0) is not None and t_detectable(wide.std(ddof=1) / math.sqrt(6), 5) is None
    assert sign_flip_detectable(wide) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"discordance": 1.5}, "share must be between 0 and 1, not 1.5"),
        ({"shared": -0.5}, "shared must be between 0 and 1, not -0.5"),
        ({"level": 1.5}, "level must be between 0 and 1, not 1.5"),
        ({"power": -1.0}, "power must be between 0 and 1, not -1.0"),
        ({"power": float("nan")}, "power must be between 0 and 1, not nan"),
        ({"level": 0.0}, "power must be between 1 − level and 1, not 0.8"),
        ({"level": 0.2, "power": 0.7}, "power must be between 1 − level and 1, not 0.7"),
        ({"problems": -3, "seeds": 2}, "a comparison needs a problem and a seed, not -3 and 2"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_name(wrong, message):
    with pytest.raises(ShaketableError) as refused:
        detectable(**{"problems": 10} | wrong)
    assert str(refused.value) == message


def test_no_disagreement_and_no_spread_is_refused_and_one_of_them_is_enough():
    with pytest.raises(
        ShaketableError, match=r"^with no discordance and no spread between seeds any difference is seen; give one"
    ):
        detectable(10, seeds=3, discordance=0.0)
    assert detectable(10, seeds=3, discordance=0.0, seed_sd=0.01) == pytest.approx(t_detectable(0.01 / math.sqrt(3), 2))
    assert detectable(10, discordance=0.0) == mcnemar_detectable(10, 0.0)


@pytest.mark.parametrize(
    ("rate", "correlation", "found"),
    [(0.5, 0.5, 0.25), (0.8, 0.0, 0.32), (0.8, 0.75, 0.08), (0.3, 1.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 0.5)],
)
def test_the_expected_disagreement_by_hand(rate, correlation, found):
    assert expected_discordance(rate, correlation) == pytest.approx(found)
    assert expected_discordance(1 - rate, correlation) == pytest.approx(found)


# ---- tests and intervals


@pytest.mark.parametrize(
    ("rate", "n", "ends"), [(0.5, 10, (0.2366, 0.7634)), (0.0, 10, (0.0, 0.2775)), (0.9, 20, (0.6990, 0.9721))]
)
def test_wilson_by_numbers_from_a_table(rate, n, ends):
    found = wilson(rate, n)
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-4)


@pytest.mark.parametrize("n", [3, 7, 30, 1000])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_wilson_ends_exactly_where_nothing_or_everything_was_solved(n, level):
    assert wilson(0.0, n, level).low == 0.0 and wilson(1.0, n, level).high == 1.0
    assert 0 < wilson(0.0, n, level).high < 1 and 0 < wilson(1.0, n, level).low < 1


def test_defaults_are_those_of_ninety_five_percent():
    a, b = np.random.default_rng(0).random((2, 40))
    d = np.round(b - a, 12)
    assert wilson(0.3, 20) == wilson(0.3, 20, 0.95) and paired_interval(d) == paired_interval(d, 0.95)
    assert paired(a, b) == paired(a, b, seed=0, level=0.95, resamples=9999)
    assert bootstrap(a, b) == bootstrap(a, b, seed=0, resamples=9999, level=0.95)
    assert sign_flip(d) == sign_flip(d, seed=0, resamples=9999)
    assert over_seeds([a, a[::-1]], [b, b]) == over_seeds([a, a[::-1]], [b, b], level=0.95)


def test_how_often_is_drawn_is_heard():
    a, b = np.random.default_rng(1).random((2, 40))
    assert len({bootstrap(a, b, resamples=n).low for n in (50, 999, 5000)}) == 3
    d = b - a
    assert sign_flip(d, resamples=99) * 100 == pytest.approx(round(sign_flip(d, resamples=99) * 100))
    assert len({sign_flip(d, resamples=n) for n in (99, 999, 5003)}) == 3
    assert len({sign_flip(d, seed=s, resamples=199) for s in range(6)}) > 1


@pytest.mark.parametrize(
    ("d", "p"),
    [([0.5, 0.5], 0.5), ([1, 1, 1], 0.25), ([0.3, -0.3], 1.0), ([1, 2, 4], 0.25), ([1, 2, -4], 1.0), ([4, 2, -1, 0, 0], 0.5)],
)
def test_a_sign_flip_of_few_differences_by_counting(d, p):
    assert sign_flip(d) == pytest.approx(p)
    assert sign_flip(np.negative(d)) == pytest.approx(p)


def test_differences_of_nothing_do_not_count_in_a_sign_flip():
    assert sign_flip([0.5, 0.25, 0.5]) == sign_flip([0.0, 0.5, 0.0, 0.25, 0.5] + [0.0] * 30)


@pytest.mark.parametrize(
    ("a", "b", "p"), [([1, 1, 1, 0], [0, 0, 0, 0], 0.25), ([1, 0], [0, 1], 1.0), ([0] * 6, [1] * 6, 0.03125)]
)
def test_mcnemar_by_counting(a, b, p):
    assert mcnemar(a, b) == pytest.approx(p) == mcnemar(b, a)
    assert mcnemar([*a, 1, 0], [*b, 1, 0]) == pytest.approx(p), "agreement tells nothing"


def test_scores_of_several_noise_seeds_are_not_binary_though_they_are_all_0_or_1():
    a, b = np.zeros((6, 2)), np.ones((6, 2))
    found = paired(a, b)
    assert found.method.startswith("sign-flip permutation") and found.p == pytest.approx(2 / 64)
    assert paired(a[:, :1], b).method.startswith("sign-flip") and paired(a, b[:, :1]).method.startswith("sign-flip")


def test_means_of_noise_seeds_that_are_equal_in_truth_do_not_differ():
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in bits."""
    rows = np.array([[0.1, 0.2, 0.3], [0.7, 0.1, 0.6], [0.3, 0.1, 0.2]])
    turned = np.array([[0.3, 0.2, 0.1], [0.6, 0.7, 0.1], [0.2, 0.3, 0.1]])
    assert (rows.mean(1) != turned.mean(1)).any()
    found = paired(rows, turned)
    assert (found.difference, found.p) == (0.0, 1.0) and found.interval == paired_interval([0.0] * 3)
    assert bootstrap(rows, turned) == Interval(0.0, 0.0)


def test_runs_of_unequal_number_whose_means_are_equal_in_truth_have_no_spread():
    a = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    b = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.3, 0.1, 0.2]]
    assert len({float(np.mean(row)) for row in b}) > 1
    found = over_seeds(a, b)
    assert found.method.startswith("no spread between the training seeds, so over problems: ") and found.p == 1.0


@pytest.mark.parametrize("turned", [False, True])
def test_one_arm_without_spread_is_still_compared_by_welch(turned):
    a = np.tile([[1.0, 0.0, 0.0, 1.0]], (3, 1))
    b = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1.0]])
    first, second = (b, a) if turned else (a, b)
    found = over_seeds(first, second)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's, of the arm without spread
        expected = stats.ttest_ind(second.mean(1), first.mean(1), equal_var=False)
    ends = expected.confidence_interval()
    assert found.method.startswith("Welch's t") and found.p == pytest.approx(expected.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((ends.low, ends.high))
    assert found.seeds == (len(first), len(second)) and found.problems == 4


def test_one_run_against_several_takes_all_of_the_several():
    one, many = [[1, 0, 0, 1, 0]], [[1, 1, 0, 1, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    found = over_seeds(one, many)
    assert found.difference == pytest.approx(np.mean(many) - np.mean(one)) and found.seeds == (1, 3)
    assert over_seeds(many, one).difference == pytest.approx(-found.difference)
    assert ONE_RUN == "this speaks of one training run only" == found.note


def test_several_runs_say_nothing_of_one():
    a, b = np.eye(3), np.array([[1.0, 1, 0], [0, 1, 1], [1, 1, 1]])
    assert over_seeds(a, b).note == "" == over_seeds(a[:2], b).note


@pytest.mark.parametrize("level", [0.5, 0.8, 0.99])
def test_without_spread_the_interval_and_the_reach_are_at_the_level(level):
    zeros, half = np.zeros((3, 20)), np.full((3, 20), 0.5)
    found = over_seeds(zeros, half, level=level)
    assert found.interval == paired_interval([0.5] * 20, level) and found.level == level
    assert found.detectable == paired(zeros.T, half.T, level=level).detectable
    by_seed = over_seeds(np.zeros((8, 1)), np.full((8, 1), 0.5), level=level)
    assert by_seed.interval == paired_interval([0.5] * 8, level)
    assert by_seed.detectable == paired([0.0] * 8, [0.5] * 8, level=level).detectable


def test_without_spread_tables_of_several_problems_are_over_problems():
    found = over_seeds(np.zeros((7, 3)), np.ones((7, 3)))
    assert found.over == "paired over 3 problems, 7 seeds each" and found.p == pytest.approx(0.25)
    assert found.method == (
        "no spread between the training seeds, so over problems: sign-flip permutation; t interval with two pseudo-problems"
    )


def test_means_of_runs_have_the_standard_error_of_their_differences():
    a, b = [[0.2], [0.4], [0.3]], [[0.5], [0.6], [0.9]]
    d = np.array([0.3, 0.2, 0.6])
    found = over_seeds(a, b)
    assert found.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    near = over_seeds([[0.5]] * 3, [[0.51], [0.52], [0.515]])
    assert near.detectable == pytest.approx(t_detectable(stats.sem([0.01, 0.02, 0.015]), 2))


def test_a_bootstrap_draws_problems_in_the_order_of_its_seed():
    a, b = np.zeros(30), np.array([0.0, 1.0] * 15)
    found = bootstrap(a, b, seed=5, resamples=400, level=0.8)
    drawn = stats.bootstrap(
        (b,), np.mean, n_resamples=400, confidence_level=0.8, method="percentile", rng=np.random.default_rng(5)
    )
    assert (found.low, found.high) == pytest.approx(tuple(drawn.confidence_interval))


# ---- what came back


def pseudo(d):
    """Student's t of the differences and one win for either side, the size of the others: mean and variance of the mean."""
    moved = d[d != 0]
    win = math.sqrt((moved**2).mean()) if len(moved) else 1.0
    more = np.array([*d, win, -win])
    return more.var(ddof=1) / len(more), len(more) - 1


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_ends_of_a_share_of_one_run_are_where_students_test_turns(level):
    b = np.array([0.0] * 30 + [1.0] * 10)
    a, c = b.copy(), np.ones(40)
    a[:21] = 1.0
    found = share_recovered(b, a, c, level=level)
    assert found.share == pytest.approx(0.7)
    for end in (found.interval.low, found.interval.high):
        d = np.round((a - b) - end * (c - b), 12)
        variance, freedom = pseudo(d)
        assert d.mean() ** 2 / variance == pytest.approx(stats.t.ppf((1 + level) / 2, freedom) ** 2, rel=1e-3)


def test_one_column_of_means_is_told_with_pseudo_problems_too():
    found = share_recovered([[0.1], [0.2]], [[0.5], [0.4]], [[0.9], [0.9]])
    assert found.share == pytest.approx(0.3 / 0.75) and (found.seeds, found.problems) == (2, 1)
    assert found.interval == Interval(-math.inf, math.inf)
    assert found.sentence() == ("of the 75.0 points that the fault takes, 30.0 came back: 40 % (95 % CI −∞ to ∞)")


def test_scores_of_one_run_are_a_row():
    flat = share_recovered([0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1])
    assert flat == share_recovered([[0, 0, 0, 1]], [[1, 0, 0, 1]], [[1, 1, 1, 1]])
    assert (flat.seeds, flat.problems) == (1, 4)


def test_more_than_all_and_less_than_nothing_can_come_back():
    more = share_recovered([0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0])
    assert (more.share, more.taken, more.returned) == (2.0, 0.5, 1.0)
    less = share_recovered([1, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1])
    assert (less.share, less.taken, less.returned) == (-0.5, 0.5, -0.25)


@pytest.mark.parametrize("odd", range(3))
def test_scores_of_fewer_seeds_are_not_stretched_to_those_of_more(odd):
    scores = [np.full((2, 3), value) for value in (0.0, 0.5, 1.0)]
    scores[odd] = scores[odd][:1]
    with pytest.raises(ShaketableError, match="a share needs the same problems three times"):
        share_recovered(*scores)


def test_no_problems_have_no_share():
    with pytest.raises(
        ShaketableError, match=r"^a share needs the same problems three times, not \(1, 0\), \(1, 0\) and \(1, 0\)$"
    ):
        share_recovered([], [], [])


@pytest.mark.parametrize(
    ("width", "finite"), [(0.01, True), (0.05, True), (0.3, True), (3.0, True), (50.0, True), (70.0, False)]
)
@pytest.mark.parametrize("inside", [0.0, 0.75, -2.0])
def test_an_end_is_found_however_near_or_far_it_is(width, finite, inside):
    def excess(at):
        return abs(at - inside) - width

    low, high = (shares._end(excess, inside, side) for side in (-1.0, 1.0))
    if finite:
        assert (low, high) == pytest.approx((inside - width, inside + width), abs=1e-5)
    else:
        assert (low, high) == (-math.inf, math.inf)


def test_the_first_of_two_ends_is_the_end():
    """Outside from 0.3 on, and inside again from 0.5 on: what is beyond is no part of the interval."""
    assert shares._end(lambda at: 1.0 if 0.3 < at < 0.5 else -1.0, 0.0, 1.0) == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.666, "67 %"), (0.996, "100 %"), (-0.126, "−13 %"), (1.5, "150 %"), (0.0, "0 %"), (math.inf, "∞"), (-math.inf, "−∞")],
)
def test_a_share_is_told_in_whole_percent(share, shown):
    found = Recovered(share, Interval(share, math.inf), 0.5, -0.0126, 1, 4)
    assert found.sentence() == (f"of the 50.0 points that the fault takes, −1.3 came back: {shown} (95 % CI {shown} to ∞)")


def test_the_variance_of_a_mean_over_seeds_that_agree_is_that_of_problems():
    d = np.tile([0.5, -0.25, 0.0, 0.5], (3, 1))
    squares = MeanSquares.of(d)
    assert shares._uncertainty(d) == (squares.variance, squares.freedom)
    alike = np.full((3, 4), 0.25)
    assert shares._uncertainty(alike) == pytest.approx(pseudo(alike[0]))
    assert shares._uncertainty(np.zeros((3, 4))) == pytest.approx(pseudo(np.zeros(4)))
    assert shares._uncertainty(d[:1]) == pytest.approx(pseudo(d[0]))

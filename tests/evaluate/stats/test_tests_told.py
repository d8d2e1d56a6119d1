"""What a comparison says of itself beside its p: over what, by which method, at which level, of how many problems and seeds."""

import numpy as np
import pytest
from scipy import stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.stats.comparison import Interval
from shaketable.evaluate.stats.crossed_effects import MeanSquares
from shaketable.evaluate.stats.power import (
    detectable,
    expected_discordance,
    mcnemar_detectable,
    mcnemar_power,
    sign_flip_detectable,
    t_detectable,
)
from shaketable.evaluate.stats.recovered import share_recovered
from shaketable.evaluate.stats.tests import mcnemar, over_seeds, paired, paired_interval, sign_flip, wilson


def scores(*shape, key=0, rate=0.5):
    return (np.random.default_rng(key).random(shape) < rate).astype(float)


@pytest.mark.parametrize(
    ("shapes", "over"),
    [
        (((1,), (1,)), "paired over 1 problem"),
        (((9,), (9,)), "paired over 9 problems"),
        (((9, 3), (9, 3)), "paired over 9 problems, 3 seeds each"),
        (((9, 3), (9, 2)), "paired over 9 problems, 3 and 2 seeds each"),
        (((9, 1), (9, 2)), "paired over 9 problems, 1 and 2 seeds each"),
    ],
)
def test_a_paired_comparison_says_over_what(shapes, over):
    a, b = (scores(*shape, key=i) for i, shape in enumerate(shapes))
    found = paired(a, b, level=0.9)
    seeds = tuple(shape[1] if len(shape) > 1 else 1 for shape in shapes)
    assert (found.over, found.problems, found.seeds, found.level) == (over, shapes[0][0], seeds, 0.9)
    test = "exact McNemar" if max(seeds) == 1 else "sign-flip permutation"
    assert found.method == f"{test}; t interval with two pseudo-problems"
    assert found.interval == paired_interval(_differences(a, b), 0.9)


def _differences(a, b):
    first, second = (x.mean(1) if x.ndim > 1 else x for x in (a, b))
    return np.round(second - first, 12)


def test_a_paired_comparison_of_means_says_what_a_sign_flip_could_have_seen_at_its_level():
    a, b = scores(60, 4), scores(60, 4, key=1, rate=0.6)
    for level in (0.8, 0.95):
        assert paired(a, b, level=level).detectable == sign_flip_detectable(_differences(a, b), level=level)
    assert paired(a, b, resamples=49).p == sign_flip(_differences(a, b), resamples=49) != sign_flip(_differences(a, b))
    assert paired(a, b, seed=3, resamples=49).p == sign_flip(_differences(a, b), seed=3, resamples=49)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_paired_interval_is_students_with_one_win_added_for_either_side(level):
    d = np.array([0.5, 0.0, -0.25, 0.5, 0.0])
    win = np.sqrt((0.25 + 0.0625 + 0.25) / 3)
    expected = stats.ttest_1samp([*d, win, -win], 0).confidence_interval(level)
    found = paired_interval(d, level)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    nothing = stats.ttest_1samp([0, 0, 0, 1, -1], 0).confidence_interval(level)
    none = paired_interval([0.0] * 3, level)
    assert (none.low, none.high) == pytest.approx((max(nothing.low, -1), min(nothing.high, 1)))


@pytest.mark.parametrize("sign", [1, -1])
def test_no_interval_reaches_beyond_one_hundred_points(sign):
    assert paired_interval([sign * 1.0] * 2) == Interval(-1.0, 1.0)
    zeros, ones = np.zeros((2, 1)), np.array([[0.4], [1.0]])
    found = over_seeds(zeros, ones) if sign > 0 else over_seeds(ones, zeros)
    assert (found.interval.low, found.interval.high) == (-1.0, 1.0)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_trained_arms_are_compared_by_the_t_of_crossed_effects_at_their_level(level):
    a, b = scores(4, 30), scores(4, 30, key=1, rate=0.7)
    found, squares = over_seeds(a, b, level=level), MeanSquares.of(b - a)
    se = np.sqrt(squares.variance)
    half = se * stats.t.ppf((1 + level) / 2, squares.freedom)
    mean = b.mean() - a.mean()
    assert (found.interval.low, found.interval.high) == pytest.approx((mean - half, mean + half))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(mean) / se, squares.freedom)) and found.level == level
    assert found.detectable == t_detectable(se, squares.freedom, level=level)
    assert (found.over, found.problems, found.seeds) == ("paired over 4 training seeds × 30 problems", 30, (4, 4))
    assert found.method == f"crossed random effects of seeds and problems, t with {squares.freedom:.3g} degrees of freedom"


def test_means_of_runs_say_that_problems_are_taken_as_given():
    found = over_seeds([[0.1], [0.3], [0.2]], [[0.4], [0.35], [0.5]], level=0.9)
    assert (found.over, found.problems, found.seeds, found.level) == ("paired over 3 training seeds", 1, (3, 3), 0.9)
    assert found.method == "paired t over training seeds; these problems taken as given"
    expected = stats.ttest_rel([0.4, 0.35, 0.5], [0.1, 0.3, 0.2]).confidence_interval(0.9)
    assert (found.interval.low, found.interval.high) == pytest.approx((expected.low, expected.high))


def test_unequal_numbers_of_runs_say_so_and_have_welchs_freedom():
    a, b = scores(3, 40), scores(5, 40, key=1)
    found = over_seeds(a, b, level=0.9)
    expected = stats.ttest_ind(b.mean(1), a.mean(1), equal_var=False)
    ends = expected.confidence_interval(0.9)
    assert (found.interval.low, found.interval.high) == pytest.approx((ends.low, ends.high))
    assert (found.problems, found.seeds, found.level) == (40, (3, 5), 0.9)
    words = f"Welch's t over the means of the runs, {expected.df:.3g} degrees of freedom; these problems taken as given"
    assert found.method == words
    se = (b.mean() - a.mean()) / expected.statistic
    assert found.detectable == pytest.approx(t_detectable(se, expected.df, level=0.9))


@pytest.mark.parametrize(
    ("a", "b", "unit", "over", "problems", "seeds"),
    [
        (np.zeros((3, 8)), np.ones((3, 8)), "problems", "paired over 8 problems, 3 seeds each", 8, (3, 3)),
        (np.zeros((3, 1)), np.full((3, 1), 0.5), "training seeds", "paired over 3 training seeds", 1, (3, 3)),
        (np.zeros((2, 1)), np.ones((3, 1)), "problems", "paired over 1 problem, 2 and 3 seeds each", 1, (2, 3)),
    ],
)
def test_without_spread_the_units_are_named(a, b, unit, over, problems, seeds):
    found = over_seeds(a, b, level=0.9)
    assert (found.over, found.problems, found.seeds, found.level) == (over, problems, seeds, 0.9)
    assert found.method.startswith(f"no spread between the training seeds, so over {unit}: ")


@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (3, 1)])
def test_one_run_in_either_arm_speaks_of_itself_at_its_level(rows):
    a, b = scores(rows[0], 20), scores(rows[1], 20, key=1)
    found = over_seeds(a, b, level=0.8)
    assert (found.note, found.level) == ("this speaks of one training run only", 0.8)
    assert (found.difference, found.interval) == (paired(a.T, b.T, level=0.8).difference, paired(a.T, b.T, level=0.8).interval)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_wilson_of_one_problem_is_that_of_scipy_and_its_ends_are_exact(n, rate):
    found = wilson(rate, n)
    if rate * n == int(rate * n):
        expected = stats.binomtest(int(rate * n), n).proportion_ci(method="wilson")
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.low == 0.0, found.high == 1.0) == (rate == 0, rate == 1)


LEVELS = [lambda x: wilson(0.5, 10, x), lambda x: paired([0, 1], [1, 1], level=x), lambda x: paired_interval([0.0, 1.0], x)]
LEVELS += [lambda x: over_seeds(np.zeros((2, 2)), np.ones((2, 2)), level=x)]
LEVELS += [
    lambda x: over_seeds(np.zeros((2, 2)), np.eye(2), level=x),
    lambda x: over_seeds(np.eye(2), np.eye(3)[:, :2], level=x),
]


@pytest.mark.parametrize("call", LEVELS)
@pytest.mark.parametrize("level", [0, 1, -0.5, 95])
def test_what_is_no_level_is_refused_everywhere(call, level):
    with pytest.raises(ShaketableError, match=f"^a confidence level lies between 0 and 1, not {level}$"):
        call(level)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson(1.5, 4), "a rate lies in 0 to 1 and needs a problem or more, not 1.5 of 4"),
        (lambda: wilson(0.5, 0), "a rate lies in 0 to 1 and needs a problem or more, not 0.5 of 0"),
        (lambda: mcnemar([0.5], [1]), "McNemar's test takes one 0/1 score a problem and arm; use paired() for means"),
        (lambda: paired([0], [0, 1]), "a paired comparison needs the same problems in both: got 1 and 2"),
        (
            lambda: paired(np.zeros((1, 1, 1)), [0]),
            "scores must have one or two sides and not be empty, not the shape (1, 1, 1)",
        ),
        (lambda: paired(0.5, 0.5), "scores must have one or two sides and not be empty, not the shape ()"),
        (lambda: paired([-0.1], [0]), "scores must be numbers from 0 to 1"),
        (lambda: paired([0], [1.1]), "scores must be numbers from 0 to 1"),
        (
            lambda: over_seeds([[0, 1]], [[0, 1, 1]]),
            "the arms answer different problems: 2 and 3 columns",
        ),
        (
            lambda: over_seeds([0.5], [0.5]),
            "trained arms need scores of shape (seeds, problems), not (1,); means are (seeds, 1)",
        ),
        (lambda: detectable(0), "a comparison needs a problem and a seed, not 0 and 1"),
        (lambda: detectable(5, seeds=0), "a comparison needs a problem and a seed, not 5 and 0"),
        (lambda: detectable(5, shared=1.5), "shared must be between 0 and 1, not 1.5"),
        (lambda: detectable(5, discordance=-0.5), "share must be between 0 and 1, not -0.5"),
        (lambda: detectable(5, level=1.0), "power must be between 1 − level and 1, not 0.8"),
        (lambda: detectable(5, power=1.0), "power must be between 1 − level and 1, not 1.0"),
        (lambda: detectable(5, level=0.5, power=0.5), "power must be between 1 − level and 1, not 0.5"),
        (lambda: expected_discordance(1.5, 0.5), "rate must be in 0 to 1 and correlation in −1 to 1, not 1.5 and 0.5"),
        (lambda: expected_discordance(0.5, -1.5), "rate must be in 0 to 1 and correlation in −1 to 1, not 0.5 and -1.5"),
        (
            lambda: share_recovered([0, 1], [0], [1]),
            "a share needs the same problems three times, not (1, 2), (1, 1) and (1, 1)",
        ),
        (lambda: share_recovered([0, 1], [1, 1], [0, 1]), "the fault takes nothing: there is no share of it"),
    ],
)
def test_a_refusal_says_exactly_this(call, message):
    with pytest.raises(ShaketableError) as refused:
        call()
    assert str(refused.value) == message


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_ends_of_what_is_allowed_are_allowed(p):
    assert 0 <= expected_discordance(p, 2 * p - 1) <= 1
    assert wilson(p, 1).high - wilson(p, 1).low > 0
    assert detectable(50, discordance=p) == mcnemar_detectable(50, p)
    assert detectable(50, seeds=3, discordance=0.2, shared=p) is not None


def test_two_arms_that_are_opposites_disagree_on_as_much_as_there_is():
    assert expected_discordance(0.5, -1.0) == 1.0 and expected_discordance(0.25, -1.0) == pytest.approx(0.75)
    assert expected_discordance() == 0.25


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize(("n", "share", "difference"), [(12, 0.4, 0.2), (16, 0.5, -0.3), (9, 1.0, 0.6), (14, 0.3, 0.0)])
def test_the_power_of_mcnemar_is_the_sum_over_all_that_can_happen(n, share, difference, level):
    """Wins and losses are multinomial; the exact test is asked for each pair of them."""
    chance = stats.multinomial(n, [(share + difference) / 2, (share - difference) / 2, 1 - share])
    total = 0.0
    for won in range(n + 1):
        for lost in range(n + 1 - won):
            if won + lost and stats.binomtest(won, won + lost).pvalue <= 1 - level + 1e-12:
                total += chance.pmf([won, lost, n - won - lost])
    assert mcnemar_power(n, share, difference, level=level) == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("power", [0.5, 0.8, 0.9])
def test_what_is_detectable_has_the_power_that_was_asked_for(power):
    found = mcnemar_detectable(80, 0.3, power=power)
    assert mcnemar_power(80, 0.3, found) == pytest.approx(power, abs=1e-4)
    se = 0.02
    seen = t_detectable(se, 7, power=power, level=0.9)
    assert stats.nct.sf(stats.t.isf(0.05, 7), 7, seen / se) == pytest.approx(power, abs=1e-4)
    assert detectable(80, discordance=0.3, power=power) == found
    squares = MeanSquares.expected(3, 50, seed=0.03**2, problem=0.25 * 0.2, rest=0.75 * 0.2)
    several = detectable(50, discordance=0.2, seeds=3, seed_sd=0.03, shared=0.25, power=power, level=0.9)
    assert several == t_detectable(np.sqrt(squares.variance), squares.freedom, level=0.9, power=power)
    assert detectable(1, seeds=3, seed_sd=0.01, power=power, level=0.9) == t_detectable(
        0.01 / np.sqrt(3), 2, level=0.9, power=power
    )


def test_beyond_one_hundred_points_nothing_is_detectable():
    assert t_detectable(0.07, 1) is None and 0.9 < t_detectable(0.06, 1) < 1
    assert t_detectable(1.0, 1e9) is None and mcnemar_power(10, 0.0, 0.0) == 0.0


def test_a_sign_flip_that_can_reject_needs_enough_problems_that_differ():
    """Few problems that differ much: the floor is what a test of signs needs, times how much they differ."""
    d = np.zeros(100)
    d[:3] = 0.5, -0.5, 0.25
    floor = mcnemar_detectable(100, 0.0) * np.mean([0.5, 0.5, 0.25])
    smooth = t_detectable(d.std(ddof=1) / 10, 99)
    assert smooth < floor == pytest.approx(sign_flip_detectable(d))
    wide = np.tile([0.5, -0.5], 50)
    assert sign_flip_detectable(wide) == pytest.approx(t_detectable(wide.std(ddof=1) / 10, 99))
    assert sign_flip_detectable(wide, level=0.8, power=0.5) == pytest.approx(
        t_detectable(wide.std(ddof=1) / 10, 99, level=0.8, power=0.5)
    )


@pytest.mark.parametrize("d", [[], [0.0, 0.0], [0.0, 0.3]])
def test_a_sign_flip_of_less_than_two_differences_tells_nothing(d):
    assert sign_flip(d) == 1.0


def test_a_share_says_its_numbers_in_one_sentence_and_in_json():
    before, after, clean = np.zeros((2, 10)), np.zeros((2, 10)), np.ones((2, 10))
    after[:, :4] = 1
    found = share_recovered(before, after, clean)
    assert (found.share, found.taken, found.returned, found.seeds, found.problems) == (0.4, 1.0, 0.4, 2, 10)
    ends = [f"{round(100 * end)} %".replace("-", "−") for end in (found.interval.low, found.interval.high)]
    assert found.sentence() == (
        f"of the 100.0 points that the fault takes, 40.0 came back: 40 % (95 % CI {ends[0]} to {ends[1]})"
    )
    assert found.to_dict() == {
        "share": 0.4, "interval": {"low": found.interval.low, "high": found.interval.high}, "taken": 1.0, "returned": 0.4,
        "seeds": 2, "problems": 10, "sentence": found.sentence(),
    }  # fmt: skip
    worse = share_recovered([1, 0, 0, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]).sentence()
    assert "−40.0 came back: −100 % (95 % CI −" in worse
    assert "(99.5 % CI " in share_recovered(before, after, clean, level=0.995).sentence()


def test_a_smaller_level_gives_a_share_a_smaller_interval():
    rng = np.random.default_rng(0)
    luck = rng.random((3, 60))
    tables = [(luck < edge).astype(float) for edge in (0.4, 0.7, 0.9)]
    wide, small = (share_recovered(*tables, level=level).interval for level in (0.95, 0.5))
    assert wide.low < small.low < small.high < wide.high


def test_the_ends_of_a_share_over_seeds_are_where_the_test_of_crossed_effects_turns():
    rng = np.random.default_rng(1)
    luck = rng.random((4, 80))
    b, a, c = ((luck < edge).astype(float) for edge in (0.3, 0.6, 0.9))
    found = share_recovered(b, a, c)
    for end in (found.interval.low, found.interval.high):
        d = (a - b) - end * (c - b)
        squares = MeanSquares.of(d)
        assert d.mean() ** 2 / squares.variance == pytest.approx(stats.t.ppf(0.975, squares.freedom) ** 2, rel=1e-3)


def test_the_degrees_of_freedom_and_the_variance_of_a_table_by_hand():
    squares = MeanSquares(by_seed=4.0, by_problem=3.0, rest=2.0, seeds=5, problems=9)
    assert squares.variance == (4 + 3 - 2) / 45
    assert squares.freedom == pytest.approx(25 / (16 / 4 + 9 / 8 + 4 / 32)) and squares.seed_sd == pytest.approx(np.sqrt(2 / 9))
    low = MeanSquares(by_seed=4.0, by_problem=1.0, rest=2.0, seeds=5, problems=9)
    assert low.variance == 4 / 45 and low.freedom == max(16 / (16 / 4 + 4 / 8 + 4 / 32), 4)
    assert MeanSquares.expected(5, 9, seed=2.0, problem=3.0, rest=7.0) == MeanSquares(25.0, 22.0, 7.0, 5, 9)


@pytest.mark.parametrize(("value", "inside"), [(0.1, True), (0.3, True), (0.2, True), (0.09, False), (0.31, False)])
def test_the_ends_of_an_interval_belong_to_it(value, inside):
    assert (value in Interval(0.1, 0.3)) is inside

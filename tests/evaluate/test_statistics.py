"""Intervals and tests of scores: scipy as the oracle where it has one, coverage by simulation where it has none."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra.numpy import arrays
from scipy import stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.statistics import mcnemar, over_seeds, paired, paired_interval, sign_flip, wilson


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def trained(seeds, problems, rng, *, by_seed, own):
    """Binary scores (seeds, problems) of two equal arms, with an effect of each training run and of each problem and arm."""
    hard = rng.normal(0.5, 1.5, (1, problems))
    tables = []
    for _ in range(2):
        logits = hard + rng.normal(0, own, (1, problems)) + rng.normal(0, by_seed, (seeds, 1))
        tables.append((rng.random((seeds, problems)) < 1 / (1 + np.exp(-logits))) * 1.0)
    return tables


# --- one rate -----------------------------------------------------------------------------------------------------------


@given(n=some.integers(1, 2000), share=some.floats(0, 1))
def test_wilson_is_that_of_scipy(n, share):
    k = round(share * n)
    expected = stats.binomtest(k, n).proportion_ci(method="wilson")
    found = wilson(k / n, n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


# --- two conditions -----------------------------------------------------------------------------------------------------


@given(some.lists(some.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=12))
def test_the_sign_flip_test_of_single_scores_is_mcnemar(d):
    a, b = [max(-x, 0.0) for x in d], [max(x, 0.0) for x in d]
    assert sign_flip(d) == pytest.approx(mcnemar(a, b))


@given(arrays(np.float64, some.tuples(some.integers(1, 8), some.integers(1, 3)), elements=some.sampled_from([0.0, 0.5, 1.0])))
def test_no_scores_make_a_paired_comparison_fail(b):
    a = np.zeros_like(b)
    for found in (paired(a, b), paired(b, b)):
        assert 0 < found.p <= 1
        assert found.difference in found.interval
        assert found.interval.high > found.interval.low
    assert found.p == 1


@pytest.mark.parametrize(
    ("problems", "discordance", "difference"),
    [(n, *law) for n in (10, 20, 50) for law in ((0.05, 0.0), (0.1, 0.1), (0.3, 0.1))] + [(200, 0.1, 0.1), (200, 0.04, 0.0)],
)
def test_the_paired_interval_covers(problems, discordance, difference):
    """One seed, 0/1; the numbers of wins and losses decide the interval, so their exact distribution decides coverage."""
    better, worse = (discordance + difference) / 2, (discordance - difference) / 2
    law = stats.multinomial(problems, [better, worse, 1 - discordance])
    total = covered = 0.0
    for wins in range(problems + 1):
        for losses in range(problems + 1 - wins):
            chance = law.pmf([wins, losses, problems - wins - losses])
            if chance > 1e-4:
                d = np.repeat([1.0, -1.0, 0.0], [wins, losses, problems - wins - losses])
                total, covered = total + chance, covered + chance * (difference in paired_interval(d))
    assert total > 0.97
    assert covered / total >= 0.94


# --- two trained arms ---------------------------------------------------------------------------------------------------


def test_one_training_run_is_compared_over_its_problems():
    a, b = trained(1, 80, np.random.default_rng(10), by_seed=0.2, own=0.3)
    assert over_seeds(a, b) == paired(a[0], b[0])


@given(some.data())
def test_no_scores_make_trained_arms_fail(data):
    shape = data.draw(some.tuples(some.integers(1, 4), some.integers(1, 4)))
    a, b = (data.draw(arrays(np.float64, shape, elements=some.sampled_from([0.0, 0.3, 1.0]))) for _ in range(2))
    found = over_seeds(a, b)
    assert 0 < found.p <= 1
    assert found.interval.high > found.interval.low
    assert found.difference in found.interval
    assert found.detectable is None or 0 < found.detectable <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "by_seed", "own", "least"),
    [(3, 0.0, 0.0, 0.95), (3, 0.3, 0.5, 0.92), (5, 0.3, 0.0, 0.93), (5, 0.1, 0.8, 0.93), (8, 0.3, 0.5, 0.93)],
)
def test_over_seeds_covers_and_keeps_its_level(seeds, by_seed, own, least):
    """Equal arms: covering 0 and not rejecting are one. The problems' own effects are what a t-test over seeds would miss."""
    rng = np.random.default_rng(12)
    found = [over_seeds(*trained(seeds, 150, rng, by_seed=by_seed, own=own)) for _ in range(800)]
    assert np.mean([0.0 in f.interval for f in found]) >= least
    assert np.mean([f.p > 0.05 for f in found]) == np.mean([0.0 in f.interval for f in found])


def test_other_problems_are_refused():
    for compare, one, other in ((paired, (2,), (3,)), (over_seeds, (2, 3), (2, 4))):
        with pytest.raises(ShaketableError, match=r"the same problems in both|other seeds or problems"):
            compare(np.zeros(one), np.zeros(other))

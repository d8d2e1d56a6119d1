"""The smallest difference seen: the tests are run on simulated scores at that difference, and see it in four of five."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from shaketable.evaluate.statistics import (
    DISCORDANCE,
    SEED_SD,
    mcnemar,
    over_seeds,
    planned_detectable,
    sign_flip,
    sign_flip_detectable,
    t_detectable,
)


def pairs(problems, discordance, difference, rng):
    """0/1 scores of two arms that disagree on that share of problems."""
    draw, agreed = rng.random(problems), rng.random(problems) < 0.6
    better = draw < (discordance + difference) / 2
    worse = (draw >= 1 - (discordance - difference) / 2) & ~better
    return np.where(worse, 1, np.where(better, 0, agreed)), np.where(better, 1, np.where(worse, 0, agreed))


@pytest.mark.parametrize(("problems", "discordance"), [(200, 0.02), (400, 0.25)])
def test_mcnemar_sees_its_detectable_difference_in_four_of_five_or_more(problems, discordance):
    rng = np.random.default_rng(0)
    d = np.zeros(problems)
    d[: round(discordance * problems)] = np.where(np.arange(round(discordance * problems)) % 2, 1, -1)
    difference = sign_flip_detectable(d)
    share = max(discordance, difference)
    seen = np.mean([mcnemar(*pairs(problems, share, difference, rng)) <= 0.05 for _ in range(800)])
    assert 0.77 <= seen <= 0.9


def test_a_sign_flip_sees_its_detectable_difference_in_four_of_five():
    seeds, rng = 4, np.random.default_rng(2)
    chance = 1 / (1 + np.exp(-rng.normal(0.5, 1.5, 8000)))
    every = np.sort(rng.binomial(seeds, chance) - rng.binomial(seeds, chance)) / seeds
    every -= every.mean()
    difference = sign_flip_detectable(every[50::100])
    seen = np.mean([sign_flip(rng.choice(every, 80) + difference, resamples=499) <= 0.05 for _ in range(500)])
    assert 0.75 <= seen <= 0.86


def test_over_seeds_sees_the_planned_difference_in_four_of_five():
    """Half of the problems are won, lost or open under all seeds; the others are drawn anew under each."""
    rng, problems, seeds = np.random.default_rng(3), 150, 5
    difference = planned_detectable(problems, seeds)

    def study():
        kept = rng.random((1, problems)) < 0.5
        shift = difference + rng.normal(0, SEED_SD, (seeds, 1))
        draw = np.where(kept, rng.random((1, problems)), rng.random((seeds, problems)))
        d = (draw < (DISCORDANCE + shift) / 2) * 1 - (draw > 1 - (DISCORDANCE - shift) / 2) * 1
        return np.maximum(-d, 0), np.maximum(d, 0)

    seen = np.mean([over_seeds(*study()).distinguishable for _ in range(500)])
    assert 0.7 <= seen <= 0.87


@given(n=some.integers(2, 60), sd=some.floats(0.01, 0.1))
@settings(max_examples=30)
def test_t_detectable_has_the_power_that_the_noncentral_t_gives(n, sd):
    found = t_detectable(sd / np.sqrt(n), n - 1)
    if found is None:
        assert n == 2
        return
    edge = stats.t.ppf(0.975, n - 1)
    assert stats.nct.sf(edge, n - 1, found / (sd / np.sqrt(n))) == pytest.approx(0.8, abs=1e-3)


def test_fewer_than_six_problems_see_nothing_at_five_percent():
    assert sign_flip_detectable(np.full(5, 0.5)) is None and sign_flip_detectable(np.zeros(6)) > 0.9
    assert sign_flip_detectable(np.zeros(200)) == pytest.approx(0.039, abs=5e-4), "as docs/statistics.md says"

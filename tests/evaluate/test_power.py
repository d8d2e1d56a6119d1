"""The smallest difference seen: the tests are run on simulated scores at that difference, and see it in four of five."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from shaketable.evaluate.statistics import (
    detectable,
    mcnemar,
    mcnemar_detectable,
    over_seeds,
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


@pytest.mark.parametrize(("problems", "discordance"), [(60, 0.3), (200, 0.25), (200, 0.02), (400, 0.1)])
def test_mcnemar_sees_its_detectable_difference_in_four_of_five(problems, discordance):
    rng = np.random.default_rng(0)
    difference = detectable(problems, discordance=discordance)
    share = max(discordance, difference)
    seen = np.mean([mcnemar(*pairs(problems, share, difference, rng)) <= 0.05 for _ in range(800)])
    assert 0.76 <= seen <= 0.84


@pytest.mark.parametrize("seeds", [4, 8])
def test_a_sign_flip_sees_its_detectable_difference_in_four_of_five(seeds):
    rng = np.random.default_rng(2)
    chance = 1 / (1 + np.exp(-rng.normal(0.5, 1.5, 8000)))
    every = np.sort(rng.binomial(seeds, chance) - rng.binomial(seeds, chance)) / seeds
    every -= every.mean()
    difference = sign_flip_detectable(every[50::100])
    seen = np.mean([sign_flip(rng.choice(every, 80) + difference, resamples=499) <= 0.05 for _ in range(500)])
    assert 0.75 <= seen <= 0.86


@pytest.mark.parametrize(("seeds", "seed_sd", "shared"), [(4, 0.02, 0.5), (5, 0.0, 0.3), (8, 0.03, 0.0)])
def test_over_seeds_sees_its_detectable_difference_in_four_of_five(seeds, seed_sd, shared):
    """Each problem is won, lost or open under all seeds; the open ones are drawn anew under each."""
    rng, problems, share = np.random.default_rng(3), 150, 0.24
    difference = detectable(problems, discordance=share, seeds=seeds, seed_sd=seed_sd, shared=shared)

    def study():
        kept = rng.random((1, problems)) < shared
        shift = difference + rng.normal(0, seed_sd, (seeds, 1))
        same, anew = rng.random((1, problems)), rng.random((seeds, problems))
        draw = np.where(kept, same, anew)
        d = (draw < (share + shift) / 2) * 1 - (draw > 1 - (share - shift) / 2) * 1
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
    assert mcnemar_detectable(5, 1.0) is None
    assert mcnemar_detectable(6, 1.0) > 0.9
    assert sign_flip_detectable(np.full(5, 0.5)) is None

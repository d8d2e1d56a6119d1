"""Crossed seeds and problems: mean squares against scipy, variance against simulation."""

import numpy as np
import pytest
from scipy import stats

from shaketable.evaluate.statistics import MeanSquares


def table(seeds, problems, *, seed_sd, problem_sd, rest_sd, rng):
    """A table of normal effects around 0."""
    rows, columns = rng.normal(0, seed_sd, (seeds, 1)), rng.normal(0, problem_sd, (1, problems))
    return rows + columns + rng.normal(0, rest_sd, (seeds, problems))


def test_the_mean_squares_give_the_f_of_a_paired_t_test():
    """With two columns the column effect is the paired t-test: F = t²."""
    d = table(7, 2, seed_sd=1, problem_sd=1, rest_sd=1, rng=np.random.default_rng(0))
    found = MeanSquares.of(d)
    assert found.by_problem / found.rest == pytest.approx(stats.ttest_rel(d[:, 0], d[:, 1]).statistic ** 2)
    turned = MeanSquares.of(d.T)
    assert (turned.by_seed, turned.by_problem, turned.rest) == pytest.approx((found.by_problem, found.by_seed, found.rest))


def test_the_variance_is_that_of_the_grand_mean():
    rng = np.random.default_rng(2)
    tables = [table(6, 30, seed_sd=0.5, problem_sd=1, rest_sd=1, rng=rng) for _ in range(3000)]
    estimated = np.mean([MeanSquares.of(d).variance for d in tables])
    truth = 0.5**2 / 6 + 1 / 30 + 1 / 180
    assert np.var([d.mean() for d in tables]) == pytest.approx(truth, rel=0.1)
    assert estimated == pytest.approx(truth, rel=0.05)


def test_a_negative_component_is_none_and_keeps_its_freedom():
    agreeing = MeanSquares(by_seed=0.1, by_problem=3.0, rest=1.0, seeds=3, problems=200)
    assert agreeing.variance == pytest.approx(3.0 / 600)
    assert agreeing.freedom == pytest.approx(9 / (1 / 2 + 9 / 199 + 1 / 398))

"""The bootstrap beside the t interval: scipy's on two paired samples as the oracle, and what it does with hard input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra.numpy import arrays
from scipy import stats

from shaketable.evaluate.statistics import bootstrap

SCORES = arrays(np.float64, 30, elements=some.integers(0, 4).map(lambda k: k / 4))


@settings(max_examples=20)
@given(a=SCORES, b=SCORES)
def test_it_is_scipys_paired_bootstrap_of_the_two_means(a, b):
    def difference(x, y, axis):
        return y.mean(axis) - x.mean(axis)

    expected = stats.bootstrap(
        (a, b), difference, paired=True, method="percentile", n_resamples=999, rng=np.random.default_rng(3)
    )
    found = bootstrap(a, b, seed=3, resamples=999)
    low, high = expected.confidence_interval
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_problems_are_drawn_with_all_their_seeds():
    """Ten equal seeds tell no more than one: resampling scores instead of problems would shrink the interval by √10."""
    rng = np.random.default_rng(0)
    a, b = (rng.random((2, 60)) < 0.5) * 1.0
    one, ten = bootstrap(a, b), bootstrap(a, np.tile(b[:, None], 10))
    assert (one.low, one.high) == (ten.low, ten.high)
    assert one.high - one.low > 0.2


@pytest.mark.parametrize(("a", "b", "value"), [([1], [0], -1.0), ([0, 1, 1], [0, 1, 1], 0.0), ([0, 0], [1, 1], 1.0)])
def test_no_spread_has_no_width(a, b, value):
    found = bootstrap(a, b)
    assert (found.low, found.high) == (value, value)

"""The share of a loss that came back, against Fieller's formula and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.statistics import share_recovered


def drawn(rng, seeds, n, *, clean=0.9, before=0.5, after=0.8):
    """0/1 scores on the same problems: whoever is right before is right after, and whoever is right after is right clean."""
    luck = rng.random((seeds, n))
    return (luck < before).astype(float), (luck < after).astype(float), (luck < clean).astype(float)


def test_the_share_is_what_returned_of_what_was_taken():
    before, after, clean = [0, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]
    found = share_recovered(before, after, clean)
    assert found.share == pytest.approx(3 / 4)
    assert (found.taken, found.returned) == pytest.approx((4 / 5, 3 / 5))
    assert found.interval.low < 0.75 < found.interval.high


def test_one_run_has_fiellers_interval():
    rng = np.random.default_rng(1)
    before, after, clean = (x[0] for x in drawn(rng, 1, 400))
    found = share_recovered(before, after, clean)
    x, y = after - before, clean - before  # share = mean x / mean y; Fieller without pseudo-problems, which are two of 402
    n, t = len(x), stats.t.ppf(0.975, len(x) - 1)
    sxx, syy, sxy = x.var(ddof=1) / n, y.var(ddof=1) / n, np.cov(x, y)[0, 1] / n
    a, b, c = y.mean() ** 2 - t**2 * syy, x.mean() * y.mean() - t**2 * sxy, x.mean() ** 2 - t**2 * sxx
    low, high = ((b + side * math.sqrt(b * b - a * c)) / a for side in (-1, 1))
    assert found.interval.low == pytest.approx(low, abs=0.01)
    assert found.interval.high == pytest.approx(high, abs=0.01)


def test_a_loss_that_is_not_sure_has_no_end():
    found = share_recovered([0, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1])
    assert math.isinf(found.interval.high) or math.isinf(found.interval.low)
    assert "∞" in found.sentence()


@pytest.mark.parametrize("seeds", [1, 5])
def test_the_interval_covers_what_it_says(seeds):
    rng, inside, trials = np.random.default_rng(seeds), 0, 300
    for _ in range(trials):
        before, after, clean = drawn(rng, seeds, 150)
        found = share_recovered(before, after, clean).interval
        inside += found.low <= 0.75 <= found.high
    assert stats.binomtest(inside, trials, 0.95).pvalue > 1e-3 or inside / trials > 0.95


def test_no_loss_is_refused():
    with pytest.raises(ShaketableError, match="costs nothing"):
        share_recovered([0, 1], [1, 1], [1, 0])


def test_a_loss_that_came_back_by_the_same_share_everywhere_is_not_certainty_though_decimals_are_not_exact():
    """0.3 − 0.1 and 0.4 − 0.2 are one difference, and two numbers: that is no spread to make an interval of."""
    before = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    found = share_recovered(before, before + 0.2, before + 0.4)
    assert found.share == pytest.approx(0.5) and found.interval.low < 0.3 and found.interval.high > 0.7

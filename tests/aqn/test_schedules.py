"""σ over the steps: formulas against numpy's geometric progressions, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import shaketable as st
from shaketable.errors import ShaketableError

sigma = some.floats(min_value=1e-6, max_value=10)
falling = some.tuples(sigma, sigma).map(lambda pair: (max(pair), min(pair)))
steps = some.integers(min_value=1, max_value=500)


@given(falling, some.integers(3, 40), steps)
def test_global_decay_is_silent_once_and_then_geometric(ends, stages, total):
    schedule = st.GlobalDecay(*ends, stages=stages)
    expected = [0.0, *np.geomspace(*ends, stages - 1)]
    for step in range(total):
        stage = next(k for k in range(stages) if k * total <= step * stages < (k + 1) * total)
        assert schedule.sigma(step, total) == pytest.approx(expected[stage], rel=1e-9)
    assert schedule.sigma(total + 7, total) == ends[1]


def test_stages_do_not_begin_a_step_late_by_rounding():
    schedule = st.GlobalDecay(0.05, 0.0005, stages=29)
    assert [schedule.sigma(step, 58) == 0 for step in range(4)] == [True, True, False, False]
    for total in range(1, 300):
        begins = [math.ceil(total * k / 10) for k in range(10)]
        found = [st.GlobalDecay(0.05, 0.0005).sigma(step, total) for step in range(total)]
        assert all(found[b] != found[b - 1] for b in begins[1:] if 0 < b < total), total


@given(falling, steps)
def test_linear_decay_is_a_straight_line_over_the_whole_run(ends, total):
    found = [st.LinearDecay(*ends).sigma(step, total) for step in range(total + 3)]
    assert found == pytest.approx([*np.linspace(*ends, total + 1), ends[1], ends[1]])
    assert found[0] == ends[0] and found[total] == ends[1]


@given(some.lists(falling, min_size=1, max_size=5), steps)
def test_origin_02_epoch_aware_sigma_is_not_zero(epochs, total):
    schedule = st.EpochAware(epochs)
    found = [schedule.sigma(step, total) for step in range(total)]
    assert min(found) > 0
    assert found[0] == epochs[0][0]
    assert min(e for _, e in epochs) <= min(found) <= max(found) <= max(s for s, _ in epochs)


def test_epochs_have_their_own_decay():
    schedule = st.EpochAware([(0.05, 0.01), (0.01, 0.0005)])
    found = [schedule.sigma(step, 20) for step in range(21)]
    expected = [*np.geomspace(0.05, 0.01, 11)[:10], *np.geomspace(0.01, 0.0005, 11)]
    assert found == pytest.approx(expected)


@given(falling, some.integers(1, 9))
def test_default_boundaries_are_geometric(ends, epochs):
    found = st.EpochAware.between(*ends, epochs).epochs
    bounds = np.geomspace(*ends, epochs + 1)
    assert np.allclose(found, np.stack([bounds[:-1], bounds[1:]], 1), rtol=1e-9)
    assert (found[0][0], found[-1][1]) == ends


def test_a_schedule_that_never_fires_is_refused_before_the_run():
    with pytest.raises(ShaketableError, match="stages=10: σ is 0 at each of 1 steps"):
        st.GlobalDecay(0.05, 0.0005).check(1)
    st.GlobalDecay(0.05, 0.0005).check(2)
    st.EpochAware([(0.05, 0.01)]).check(1)
    with pytest.raises(ShaketableError, match="σ is 0"):
        st.Constant(0).check(10)

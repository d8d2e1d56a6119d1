"""What a training run is asked to do: checked at once, in one line, without torch."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shaketable.errors import ShaketableError
from tests.train.configs import config

PLAN = "relative_gaussian:0.05@op.matmul"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan": PLAN, "plan_in": "everywhere"}, "plan_in: .*'both'.*got 'everywhere'"),
        ({"warmup": 10}, "a warm-up of 10 steps leaves nothing of a run of 10"),
        ({"stepps": 3}, "stepps: "),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message):
    with pytest.raises(ShaketableError, match=message) as caught:
        config(**fields)
    assert "\n" not in str(caught.value)


@given(some.integers(1, 60), some.integers(0, 70))
def test_origin_16_the_first_and_the_last_step_are_always_evaluated(steps, every):
    made = config(steps=steps, eval_every=every)
    evaluated = {step for step in range(steps + 1) if made.evaluates_at(step)}
    assert evaluated == {0, steps} | (set(range(0, steps + 1, every)) if every else set())

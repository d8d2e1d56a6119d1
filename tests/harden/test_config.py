"""What cannot be hardened as asked is one line."""

import pytest

from shaketable.errors import ShaketableError
from shaketable.harden.results import interval_end
from tests.harden.small_runs import small


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"target": 1.5}, "target: Input should be less than or equal to 1"),
        ({"target": -0.1}, "greater than or equal to 0"),
        ({"rungs": ("calibrat",)}, "there is no stage 'calibrat'"),
        ({"task": None}, "a task or a file of prompts"),
        ({"prompts": "a.txt"}, "one of the two"),
        ({"plans": ()}, "at least one plan"),
        ({"plans": (), "conditions": {"x": "gain:1@layer.3"}, "rungs": ("rescale",)}, "rescale needs a plan"),
        ({"micro_batch": 5}, "does not divide"),
        ({"lora": 4, "rungs": ("calibrate", "distil")}, "calibrate changes the weights that LoRA leaves"),
        ({"lora": 4, "warm_start": 3}, "a warm start trains all weights"),
        ({"task": None, "prompts": "a.txt", "rungs": ("supervise",)}, "supervise needs a task"),
        ({"task": None, "prompts": "a.txt", "score": "accuracy"}, "there is no accuracy"),
    ],
)
def test_what_does_not_fit_together_is_one_line(fields, line):
    with pytest.raises(ShaketableError, match=line) as error:
        small(**fields)
    assert "\n" not in str(error.value)


def test_the_old_name_of_rescale_is_read():
    assert small(rungs=["calibrate", "regauge", "distil"]).rungs == ("calibrate", "rescale", "distil")


def test_stages_have_a_fixed_order():
    assert small(rungs=("distil", "calibrate", "distil")).climbed == ("calibrate", "distil")


@pytest.mark.parametrize(("low", "high", "shown"), [(None, None, ("−∞", "∞")), (-0.031, 0.62, ("−3%", "62%"))])
def test_an_end_that_is_not_finite_has_its_sign(low, high, shown):
    share = {"share": 0.5, "interval": {"low": low, "high": high}}
    assert (interval_end(share, "low"), interval_end(share, "high")) == shown

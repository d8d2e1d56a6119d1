"""What cannot be hardened as asked is one line."""

import pytest

from shaketable.errors import ShaketableError
from tests.harden.small_runs import small


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"task": None}, "a task or a file of prompts"),
        ({"micro_batch": 5}, "does not divide"),
        ({"lora": 4, "warm_start": 3}, "a warm start trains all weights"),
        ({"task": None, "prompts": "a.txt", "rungs": ("supervise",)}, "supervise needs a task"),
        ({"task": None, "prompts": "a.txt", "score": "accuracy"}, "there is no accuracy"),
    ],
)
def test_what_does_not_fit_together_is_one_line(fields, line):
    with pytest.raises(ShaketableError, match=line) as error:
        small(**fields)
    assert "\n" not in str(error.value)


def test_a_published_record_is_read_and_its_removed_stages_are_not_run():
    config = small(rungs=["calibrate", "regauge", "distil"], calibrate_n=64, clean_loss=0.02)
    assert config.rungs == ("calibrate", "regauge", "distil")
    with pytest.raises(ShaketableError, match="the stage calibrate was removed"):
        config.stages  # noqa: B018
    assert small(rungs=("supervise", "distil", "supervise")).stages == ("distil", "supervise")

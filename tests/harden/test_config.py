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
    ],
)
def test_what_does_not_fit_together_is_one_line(fields, line):
    with pytest.raises(ShaketableError, match=line) as error:
        small(**fields)
    assert "\n" not in str(error.value)


def test_a_published_record_is_read_and_its_removed_stages_are_not_run():
    config = small(rungs=["calibrate", "distil"], calibrate_n=64, clean_loss=0.02, target=0.8, score="auto")
    assert config.rungs == ("calibrate", "distil")
    with pytest.raises(ShaketableError, match="no stage 'calibrate' in this version"):
        config.check_stages()

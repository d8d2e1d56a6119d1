"""What a study may ask for."""

import pytest

from shaketable.errors import ShaketableError
from shaketable.study.config import OPTIONS
from tests.study.small_studies import data, study


def test_a_run_has_a_core_at_least():
    assert study(engine={"threads": 1}).engine.threads == 1
    with pytest.raises(ShaketableError, match="threads"):
        study(engine={"threads": 0})


@pytest.mark.parametrize(
    "name", ["model", "task", "seed", "plan", "plan_seed", "plan_in", "aqn", "device", "dtype", "report_to"]
)
def test_what_an_arm_or_the_study_says_is_no_option_of_training(name):
    assert name not in OPTIONS
    with pytest.raises(ShaketableError, match=name):
        study(train=data()["train"] | {name: 1})

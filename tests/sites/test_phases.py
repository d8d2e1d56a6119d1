"""What the program is doing: which phases there are, and what one rollout is."""

import pytest

from shaketable.errors import PlanError
from shaketable.sites.phases import as_rollout, current_rollout, phase


def test_an_unknown_phase_is_refused():
    with pytest.raises(PlanError, match=r"^unknown phase 'rolout'; did you mean 'rollout'\? valid: eval, rollout, train$"):
        phase("rolout").__enter__()


def test_one_outermost_block_is_one_rollout_and_each_has_a_number_of_its_own():
    assert current_rollout() is None
    with phase("rollout"):
        first = current_rollout()
        with phase("rollout"):
            assert current_rollout() == first
        assert as_rollout(current_rollout)() == first == current_rollout()
        with phase("eval"):
            assert current_rollout() is None, "an evaluation inside of a rollout is none"
            with phase("rollout"):
                assert current_rollout() == first
    with phase("rollout"):
        second = current_rollout()
    third = as_rollout(lambda: (current_rollout(), as_rollout(current_rollout)()))()
    assert first is not None and len({first, second, *third}) == 3 and third[0] == third[1]
    assert current_rollout() is None
    with phase("train"):
        assert current_rollout() is None

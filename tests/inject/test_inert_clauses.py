"""Clauses that should have acted by now: which passes count for which clause, and what is said of it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError
from shaketable.inject.inert import InertCheck
from shaketable.inject.injection import Injection
from shaketable.inject.pass_context import Entry, Frame, Pass
from shaketable.plan import Plan

X = torch.ones(16, 32)


def made(plan, **options):
    injection = Injection(Plan.parse(plan, seed=0), **{"rank": 0, **options})
    injection.enabled = True
    return injection


def ended(check, acts=None, phase="train", owner=0, is_root=True, recomputing=False, captured=False):
    """Tell a check that a pass has ended."""
    injection = check.injection
    acts = (True,) * len(injection.faults) if acts is None else acts
    current = Pass(injection, phase, 1, acts, tuple(injection.faults), captured)
    check.end(Frame(Entry(1, nn.Identity(), None, owner, is_root=is_root), current, None, None, recomputing))


def never(n, text="gain:1@module.linear"):
    return f"{text} was on in {n} {'pass' if n == 1 else 'passes'} and never fired"


# ---- which passes count


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_clause_that_was_on_is_named_with_its_passes(passes):
    check = made("gain:1@module.linear").inert_check
    assert check.inert() == {}
    for _ in range(passes):
        ended(check)
    assert check.inert() == {0: never(passes)} == check.inert(), "also when it is asked again"
    ended(check)
    assert check.inert() == {0: never(passes + 1)}


def test_only_clauses_that_were_on_are_named_by_their_number():
    check = made("gain:1@module.first;gain:2@module.second;gain:3@module.third").inert_check
    ended(check, (True, False, True))
    ended(check, (False, False, True))
    assert check.inert() == {0: never(1, "gain:1@module.first"), 2: never(2, "gain:3@module.third")}


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_a_clause_is_given_the_passes_that_it_is_asked_to_be_given(least):
    check = made("gain:1@module.linear").inert_check
    for _ in range(3):
        ended(check)
    assert bool(check.inert(passes=least)) is (least <= 3)


@pytest.mark.parametrize(
    ("options", "counted", "judged"),
    [
        ({}, 1, True),
        ({"is_root": False}, 0, False),
        ({"recomputing": True}, 0, False),
        ({"captured": True}, 1, False),
        ({"acts": (False,)}, 1, False),
    ],
)
def test_passes_of_the_whole_model_count_and_only_where_something_was_on(options, counted, judged):
    check = made("gain:1@module.linear").inert_check
    ended(check, **options)
    assert check.phases.total() == counted and bool(check.inert()) is judged


def test_a_pass_that_raised_counts_for_nothing():
    check = made("gain:1@module.linear").inert_check
    try:
        raise KeyError
    except KeyError:
        ended(check)
    assert check.phases.total() == 0 and check.inert() == {}


def test_passes_are_counted_in_their_phase_and_no_phase_is_ever_added():
    check = made("gain:1@module.linear").inert_check
    assert dict(check.phases) == {"rollout": 0, "train": 0, "eval": 0}
    for phase in ("eval", "rollout", "eval"):
        ended(check, phase=phase)
    assert dict(check.phases) == {"rollout": 1, "train": 0, "eval": 2}


def test_passes_are_counted_also_when_no_clause_is_waiting_any_more():
    check = made("gain:1@module.linear").inert_check
    check.waiting.clear()
    ended(check)
    assert check.phases["train"] == 1 and check.inert() == {} and not check._new


def test_a_model_that_a_clause_does_not_match_says_nothing_about_it():
    check = made("gain:1@module.first;gain:2@module.second").inert_check
    check.matched = {1: {1}, 2: set()}
    for owner, passes in ((0, 1), (1, 2), (2, 4)):
        for _ in range(passes):
            ended(check, owner=owner)
    assert check.inert() == {0: never(1, "gain:1@module.first"), 1: never(3, "gain:2@module.second")}


# ---- clauses that act backward


BACKWARD = "gain:1@module.linear,direction=backward"


def test_a_backward_clause_is_judged_by_passes_with_gradients_once_a_backward_pass_is_known():
    check = made(BACKWARD).inert_check
    with torch.no_grad():
        ended(check)
    assert check.inert(trained=True) == {}
    ended(check)
    ended(check)
    assert check.inert() == {} and check.inert(trained=True) == {0: never(2, BACKWARD)}


@pytest.mark.parametrize("direction", ["both", "forward"])
def test_a_clause_that_acts_forward_too_is_judged_by_all_passes(direction):
    check = made(f"gain:1@module.linear,direction={direction}").inert_check
    with torch.no_grad():
        ended(check)
    assert list(check.inert()) == [0]


@pytest.mark.parametrize(("before", "after", "judged"), [(False, True, True), (False, False, False), (True, True, False)])
def test_gradients_that_came_after_the_first_pass_say_that_a_backward_pass_has_run(before, after, judged):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    injection = made(BACKWARD)
    injection.attach(model)
    check = injection.inert_check
    model[1].bias.grad = torch.ones(2) if before else None
    ended(check)
    model[1].bias.grad = torch.ones(2) if after else None
    ended(check)
    assert bool(check.inert()) is judged
    injection.close(check=False)


def test_whether_there_were_gradients_is_looked_at_in_the_first_pass_that_wants_them():
    model = nn.Sequential(nn.Linear(2, 2))
    injection = made(BACKWARD)
    injection.attach(model)
    check = injection.inert_check
    with torch.no_grad():
        ended(check)
    assert check._without_gradients is None
    ended(check)
    assert check._without_gradients is True
    injection.close(check=False)


# ---- clauses that fired


def site(forward=0, backward=0, changed=0, alive=0, fault="gain:1", name="module.linear"):
    return SimpleNamespace(
        forward=forward,
        backward=backward,
        fault=fault,
        site=name,
        measured=lambda: SimpleNamespace(changed=changed, alive=alive),
    )


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (site(), None),
        (site(forward=3, alive=1000), "gain:1@module.linear fired 3 times and changed no value"),
        (site(backward=2, alive=1000), "gain:1@module.linear fired 2 times and changed no value"),
        (site(forward=1, backward=1, alive=1000), "gain:1@module.linear fired 2 times and changed no value"),
        (site(forward=3, alive=100), None),
        (site(forward=3, alive=0), None),
        (site(forward=3, changed=1, alive=1000), None),
    ],
)
def test_a_clause_that_fired_is_inert_if_enough_values_were_seen_and_none_changed(found, line):
    check = made("gain:1@module.linear").inert_check
    assert check.inert(sites=[found]) == ({} if line is None else {0: line})
    assert (0 in check.waiting) is (found.measured().changed == 0)


def test_a_clause_that_has_changed_a_value_is_not_looked_at_again():
    check = made("gain:1@module.a;gain:1@module.b").inert_check
    assert list(check.inert(sites=[site(forward=1, changed=5), site(forward=1, alive=1000)])) == [1]
    assert list(check.waiting) == [1]
    assert list(check.inert(sites=[site(forward=2, alive=1000), site(forward=2, alive=1000)])) == [1]


@pytest.mark.parametrize("back", [False, True])
def test_a_clause_whose_magnitude_was_set_may_be_small_on_purpose_also_after_it_was_set_back(back):
    injection = made("gain:1@module.a;gain:1@module.b")
    check, found = injection.inert_check, [site(forward=1, alive=1000), site(forward=1, alive=1000)]
    injection.set_magnitude(2, 0)
    if back:
        check.inert(sites=found)
        injection.set_magnitude(1, 0)
    assert list(check.inert(sites=found)) == [1]


def test_a_moved_clause_that_never_fires_is_named_all_the_same():
    injection = made("gain:1@module.linear")
    injection.set_magnitude(2)
    ended(injection.inert_check)
    assert list(injection.inert_check.inert()) == [0]


# ---- the end of a step


def test_all_inert_clauses_are_named_when_a_step_ends():
    injection = made("gain:1@module.a;gain:2@module.b", step=4)
    ended(injection.inert_check)
    with pytest.raises(InertError) as raised:
        injection.inert_check.end_step(5)
    lines = f"{never(1, 'gain:1@module.a')}; {never(1, 'gain:2@module.b')}"
    assert str(raised.value) == f"{lines} by the end of step 4 (allow_inert=True accepts this)"
    injection.inert_check.end_step(4)


@pytest.mark.parametrize(("allow", "step", "raises"), [(False, 1, True), (True, 1, False), (False, 0, False)])
def test_a_step_that_does_not_change_or_may_be_inert_is_not_judged(allow, step, raises):
    injection = made("gain:1@module.linear", allow_inert=allow)
    ended(injection.inert_check)
    try:
        injection.inert_check.end_step(step)
    except InertError:
        assert raises
    else:
        assert not raises


def test_going_back_to_an_earlier_step_is_another_step():
    injection = made("gain:1@module.linear", step=3)
    ended(injection.inert_check)
    with pytest.raises(InertError, match="by the end of step 3"):
        injection.step = 2


def test_a_step_in_which_everything_acted_ends_well():
    model = nn.Sequential(nn.Linear(32, 32))
    injection = st.inject(model, "gain:1@module.linear").enable()
    model(X)
    injection.step = 1
    assert injection.inert_check.waiting == {}
    injection.close()


def test_what_is_cleared_has_seen_nothing():
    check = made("gain:1@module.a;gain:1@module.b").inert_check
    ended(check)
    check.inert(sites=[site(forward=1, changed=1), site()])
    check.clear()
    assert list(check.waiting) == [0, 1] and check.phases.total() == 0 and check.inert() == {}
    assert check._without_gradients is None


def test_a_new_check_waits_for_all_clauses_and_they_match_everywhere():
    injection = made("gain:1@module.a;gain:1@module.b;mxfp4@module.c")
    check = InertCheck(injection)
    assert list(check.waiting) == [0, 1, 2] and check.matched == {}

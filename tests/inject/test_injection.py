"""An injection's own switches and states: closing, phases, magnitudes, steps, ranks, and going on in another process."""

import json

import pytest
import torch

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject.injection import Injection, this_rank
from shaketable.plan import Plan

X = torch.ones(2, 4)


def made(plan="gain:1@module.linear", **options):
    return Injection(Plan.parse(plan, seed=options.pop("seed", 0)), **{"rank": 0, "allow_inert": True, **options})


@pytest.mark.parametrize("sampler", [False, True])
def test_only_a_sampler_has_a_phase_and_it_must_be_one(sampler):
    injection = made(sampler=sampler)
    assert (injection.phase, injection.hold, injection.sampler) == (
        ("rollout", True, True) if sampler else (None, False, False)
    )
    message = r"^unknown phase 'evl'; did you mean 'eval'\? valid: eval, rollout, train$"
    message = (
        message
        if sampler
        else r"^only a sampling engine sets the phase of its models; elsewhere write `with st\.phase\(\.\.\.\)`$"
    )
    with pytest.raises(PlanError, match=message):
        injection.phase = "evl"
    if sampler:
        injection.phase = "eval"
        assert injection.phase == "eval" == injection.phase_now()


def test_a_process_of_a_group_has_the_rank_that_torch_says(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == 3
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert this_rank() == 5 == Injection(Plan.parse("gain:1@layer.0")).rank and made(rank=1).rank == 1


def test_what_was_counted_is_told_before_the_magnitude_changes(monkeypatch):
    """What a GPU has counted by then belongs to the magnitude of then."""
    injection, told = Injection(Plan.parse("gain:0.1@module.linear")), []
    monkeypatch.setattr(injection, "settle", lambda: told.append(injection.faults[0].magnitude))
    injection.set_magnitude(0.5)
    assert told[0] == 0.1 and injection.faults[0].magnitude == 0.5


def test_a_process_that_goes_on_keeps_the_statistic_that_a_fault_took_at_its_first_use():
    model = torch.nn.Linear(4, 4)
    first, second = torch.randn(8, 4), 10 * torch.randn(8, 4)
    begun = st.inject(model, "bias:0.5@module.linear")
    with begun:
        model(first)
        expected = model(second)
        counted = json.loads(json.dumps(begun.counted()))
    later, anew = (st.inject(model, "bias:0.5@module.linear", allow_inert=True) for _ in range(2))
    with later:
        later.go_on(counted)
        assert torch.equal(model(second), expected)
    with anew:
        assert not torch.equal(model(second), expected), "taken from this tensor, it is another one"

"""An injection's own switches and states: closing, phases, magnitudes, steps, ranks, and going on in another process."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject import weights
from shaketable.inject.injection import Injection, this_rank
from shaketable.inject.passes import Entry
from shaketable.plan import Plan

X = torch.ones(2, 4)


def made(plan="gain:1@module.linear", **options):
    return Injection(Plan.parse(plan, seed=options.pop("seed", 0)), **{"rank": 0, "allow_inert": True, **options})


@pytest.mark.parametrize("skipped", [False, True])
def test_a_pass_that_is_spared_is_left_alone_and_is_counted_all_the_same(skipped):
    injection = made()
    injection.enabled = True
    injection.skip_pass = lambda: skipped
    entry = Entry(0, nn.Identity(), None)
    first, second = (injection.begin_pass(entry, "train") for _ in range(2))
    assert first.acts == (not skipped,) and first.key != second.key


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


@pytest.mark.parametrize(("modes", "training"), [((), False), ((False, False), False), ((False, True), True)])
def test_an_injection_trains_if_one_of_its_models_does(modes, training):
    injection = made()
    for mode in modes:
        injection.attach(nn.Linear(4, 4).train(mode))
    assert injection.is_training is training


def test_a_process_of_a_group_has_the_rank_that_torch_says(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == 3
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert this_rank() == 5 == Injection(Plan.parse("gain:1@layer.0")).rank and made(rank=1).rank == 1


def test_a_softmax_that_attention_hides_is_warned_of_when_a_plan_is_given(tiny_llama):
    with pytest.warns(RuntimeWarning, match=r"^gain:1@op\.softmax: attention is one kernel \(sdpa\)"):
        st.inject(tiny_llama, "gain:1@op.softmax", allow_inert=True)


def test_a_weight_that_is_still_sharded_is_refused(monkeypatch):
    class DTensor(torch.Tensor):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=DTensor))
    own = SimpleNamespace(tap=SimpleNamespace(site=SimpleNamespace(label="module.linear"), name="a.weight"))
    assert weights._whole(X, own) is X
    with pytest.raises(PlanError) as refused:
        weights._whole(X.as_subclass(DTensor), own)
    assert str(refused.value) == (
        "module.linear: a.weight is still sharded when it is used (tensor parallel, or called past FSDP2's root); "
        "weight faults act on whole weights"
    )


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

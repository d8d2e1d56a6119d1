"""An injection as a switch: nested, disabled inside of a pass, and going on in another process."""

import json

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.injection import inject

X = torch.ones(2, 4)
GAIN = "gain:1@module.linear"


def linear():
    """A linear that adds up what it is given, in a model."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[0].weight)
    return model


def is_hooked(model):
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- on, off, closed


def test_blocks_nest_and_the_outermost_closes_whatever_raised_inside():
    model = linear()
    injection = inject(model, GAIN)
    with injection as outer:
        with pytest.raises(KeyError), injection as inner:
            raise KeyError
        assert inner is outer is injection.ledger and injection.enabled and not injection.closed
        model(X)
    assert injection.closed and outer.forward == 1
    with pytest.raises(st.PlanError, match="closed"):
        injection.enable()
    broken = inject(model, GAIN)
    with pytest.raises(ZeroDivisionError), broken:
        _ = 1 / 0
    assert broken.closed and not is_hooked(model)


@pytest.mark.parametrize("plan", [GAIN, "gain:1@op.matmul"])
def test_a_plan_that_is_switched_off_inside_of_a_pass_does_no_more_in_it_and_closes_its_frame(plan):
    model = nn.Sequential(linear(), nn.Identity(), linear())
    injection = inject(model, plan).enable()
    handle = model[1].register_forward_hook(lambda *_: injection.disable() and None)
    assert torch.equal(model(X), torch.full((2, 4), 32.0)), "one of two was doubled"
    assert injection.calls.stack == []
    handle.remove()
    injection.enable()
    assert torch.equal(model(X), torch.full((2, 4), 64.0))
    injection.close()


# ---- what changes


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

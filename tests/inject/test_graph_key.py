"""What those who keep captured graphs are told: when a graph is no longer right, and that it is when only a magnitude changed."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.cuda_graphs import fingerprint


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))


def test_a_plan_and_its_switch_are_in_it(model):
    clean = fingerprint(model)
    injection = st.inject(model, "relative_gaussian:0.1@module.linear", allow_inert=True)
    off = fingerprint(model)
    on = injection.enable() and fingerprint(model)
    assert len({clean, off, on}) == 3
    assert injection.disable() and fingerprint(model) == off
    injection.close()
    assert fingerprint(model) == clean


def test_a_magnitude_of_noise_is_not_in_it_unless_it_is_0(model):
    with st.inject(model, "relative_gaussian:0.1@module.linear", allow_inert=True):
        injection = next(iter(_injections_on(model)))
        loud = fingerprint(model)
        injection.set_magnitude(0.2)
        assert fingerprint(model) == loud
        injection.set_magnitude(0.0)
        assert fingerprint(model) != loud


def test_a_magnitude_that_a_graph_holds_is_in_it(model):
    injection = st.inject(model, "dead_zone:0.1@module.linear", allow_inert=True).enable()
    before = fingerprint(model)
    injection.set_magnitude(0.2)
    assert fingerprint(model) != before
    injection.close()


def test_sigma_is_not_in_it_unless_it_is_0(model):
    """Noisy weights lie in one place; without noise a graph would read the clean ones."""
    with st.AQN.load("constant:0.1").attach(model, 3, allow_inert=True) as attached:
        noisy = fingerprint(model)
        attached.injection.set_magnitude(0.3)
        assert fingerprint(model) == noisy
        attached.injection.set_magnitude(0.0)
        assert fingerprint(model) != noisy


def test_plans_on_other_models_are_not_in_it(model):
    clean = fingerprint(model)
    with st.inject(nn.Sequential(nn.Linear(4, 4)), "gain:0.1@module.linear", allow_inert=True):
        assert fingerprint(model) == clean
        assert fingerprint(model[1]) == fingerprint(model)
    with st.inject(model, "gain:0.1@module.linear", allow_inert=True):
        assert fingerprint(model[1]) != clean, "also of a part"


def _injections_on(model):
    from shaketable.inject import cuda_graphs

    own = {id(p) for p in model.parameters()}
    return [i for i in cuda_graphs._injections if not i.closed and cuda_graphs._is_on(i, own)]

"""Faulty weights of a sampling engine, which are written into the parameters: shown here on plain models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject import weights_in_place
from shaketable.inject.injection import Injection
from shaketable.plan import Plan

NORMS = "relative_gaussian:0.1@module.rmsnorm,point=weight"


def put_on(model, plan, **kwargs):
    """A plan on a model that plays the model of an engine."""
    injection = Injection(Plan.parse(plan), sampler=True, **kwargs)
    injection.attach(model)
    return injection.enable()


def is_norm(name):
    return "norm" in name


def test_it_is_the_noise_that_a_trainer_would_see_at_the_same_step(tiny_llama):
    aqn = st.AQN.load("constant:0.1,seed=5")
    aqn.attach(tiny_llama, 10, step=3, sampler=True).enable()
    written = {name: p.detach().clone() for name, p in tiny_llama.named_parameters() if is_norm(name)}
    aqn_of_trainer = {}
    other = type(tiny_llama)(tiny_llama.config).eval()
    other.load_state_dict(tiny_llama.state_dict() | {k: torch.ones_like(v) for k, v in written.items()})
    for name, module in other.named_modules():
        if is_norm(name):
            module.register_forward_hook(
                lambda m, _, __, name=name: aqn_of_trainer.update({f"{name}.weight": m.weight.clone()})
            )
    with aqn.attach(other, 10, step=3), st.phase("rollout"):
        other(torch.tensor([[1, 2, 3]]))
    assert aqn_of_trainer.keys() == written.keys()
    assert all(torch.equal(aqn_of_trainer[name], value) for name, value in written.items())


def test_a_draw_is_counted_once_and_again_for_new_weights(tiny_llama):
    injection = put_on(tiny_llama, NORMS)
    matched = injection.ledger.sites[0].matched
    assert injection.ledger.forward == matched
    injection.disable().enable()
    assert injection.ledger.forward == matched
    injection.step = 1
    assert injection.ledger.forward == 2 * matched
    with torch.no_grad():
        tiny_llama.get_parameter("model.norm.weight").data.fill_(2.0)
    injection.rewrite()
    assert injection.ledger.forward == 2 * matched + 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_weights_of_any_type_come_back_bit_for_bit(dtype):
    model = Model().to(dtype)
    with torch.no_grad():
        model.a.weight[0, 0], model.a.weight[0, 1], model.a.weight[1, 1] = float("nan"), -0.0, float("inf")
    bits = model.a.weight.detach().clone().view(weights_in_place._BITS[model.a.weight.element_size()])
    injection = put_on(model, "relative_gaussian:0.1@module.linear,point=weight")
    for step in (1, 2):
        injection.step = step
    assert not torch.equal(model.a.weight.detach().view(bits.dtype), bits)
    injection.close()
    assert torch.equal(model.a.weight.detach().view(bits.dtype), bits)

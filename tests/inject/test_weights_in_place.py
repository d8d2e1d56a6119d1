"""Faulty weights of a sampling engine, which are written into the parameters: shown here on plain models."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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


class Weights(RuleBasedStateMachine):
    """New weights, magnitudes, switches, steps, phases and a second plan on `b`, in any order. Gains of 1 and 3 are exact."""

    @initialize()
    def begin(self):
        self.model = Model()
        with torch.no_grad():
            self.model.a.weight.copy_(torch.eye(4)), self.model.b.weight.copy_(torch.eye(4) * 2)
        self.clean = {"a": torch.eye(4), "b": torch.eye(4) * 2}
        self.gains, self.is_on, self.phase, self.second = [1.0, 3.0], True, "rollout", None
        self.new_values = count(3, 2)
        """Odd numbers: new weights that happen to be the faulty ones could not be told from them."""
        plan = "gain:1@module.a,point=weight,phase=rollout;gain:3@module.b,point=weight"
        self.injection = put_on(self.model, plan, allow_inert=True)

    @rule(layer=some.sampled_from("ab"), replaced=some.booleans())
    @torch.no_grad()
    def load(self, layer, replaced):
        module, self.clean[layer] = getattr(self.model, layer), torch.eye(4) * next(self.new_values)
        if replaced:
            module.weight = nn.Parameter(self.clean[layer].clone())
        else:
            module.weight.data.copy_(self.clean[layer])
        self.injection.rewrite()

    @rule(clause=some.sampled_from([0, 1]), gain=some.sampled_from([0.0, 1.0, 3.0]))
    def set_magnitude(self, clause, gain):
        self.injection.set_magnitude(gain, clause)
        self.gains[clause] = gain

    @rule()
    def switch(self):
        self.is_on = not self.is_on
        self.injection.enable() if self.is_on else self.injection.disable()

    @rule(step=some.integers(0, 3))
    def set_step(self, step):
        self.injection.step = step

    @rule(phase=some.sampled_from(["rollout", "eval"]))
    def set_phase(self, phase):
        self.injection.phase = self.phase = phase

    @rule()
    def second_plan(self):
        if self.second is None:
            self.second = put_on(self.model, "gain:1@module.b,point=weight", allow_inert=True)
        else:
            self.second.close()
            self.second = None

    @invariant()
    def weights_are_the_clean_ones_with_the_faults_of_now(self):
        if hasattr(self, "injection"):
            gains = [self.gains[0] * (self.phase == "rollout"), self.gains[1]] if self.is_on else [0.0, 0.0]
            assert torch.equal(self.model.a.weight, self.clean["a"] * (1 + gains[0]))
            factor = (1 + gains[1]) * (2 if self.second is not None else 1)
            assert torch.equal(self.model.b.weight, self.clean["b"] * factor)

    def teardown(self):
        if hasattr(self, "injection"):
            if self.second is not None:
                self.second.close()
            self.injection.close()
            assert torch.equal(self.model.a.weight, self.clean["a"]) and torch.equal(self.model.b.weight, self.clean["b"])


TestWeights = Weights.TestCase
TestWeights.settings = settings(max_examples=25, stateful_step_count=20)

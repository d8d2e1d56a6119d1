"""Weight noise that is drawn once per rollout, and what counts as one rollout."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan

PLAN = "absolute_gaussian:0.1@module.linear,point=weight,phase=rollout+train"


class Sampler(nn.Module):
    """A layer with a `generate` of three forwards."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.proj(x)

    def generate(self):
        return [self(torch.eye(8)) for _ in range(3)]


@pytest.fixture
def held():
    """An injection that holds, on a sampler."""
    injection = Injection(Plan.parse(PLAN), hold=True, allow_inert=True)
    model = Sampler()
    injection.attach(model)
    injection.enable()
    yield model, injection
    injection.close(check=False)


@torch.no_grad()
def test_one_weight_per_rollout_and_another_for_the_next(held):
    model, injection = held
    first, second = model.generate(), model.generate()
    assert all(torch.equal(first[0], x) for x in first)
    assert all(torch.equal(second[0], x) for x in second)
    assert not torch.equal(first[0], second[0])
    assert injection.rollouts.total == 2


def test_training_takes_the_noise_of_the_newest_rollout_of_its_step(held):
    model, injection = held
    with torch.no_grad():
        rollouts = [model.generate()[0] for _ in range(3)]
    model.train()
    assert torch.equal(model(torch.eye(8)).detach(), rollouts[2])
    injection.step = 1
    first = model(torch.eye(8)).detach()
    assert not any(torch.equal(first, seen) for seen in rollouts)
    with torch.no_grad():
        assert torch.equal(model.generate()[0], first), "before the first rollout of a step, what that one will see"


@torch.no_grad()
def test_a_draw_is_counted_and_measured_once(held):
    model, injection = held
    for _ in range(5):
        model.generate()
    spot = next(iter(injection.ledger.sites[0].spots.values()))
    assert (spot.counts, spot.forward.fires, injection.fires) == ({"rollout": [5, 0]}, 5, 5)
    assert injection.ledger.sites[0].magnitude == pytest.approx(0.1, rel=0.2)


@torch.no_grad()
def test_a_phase_is_one_rollout_whatever_is_called_inside(held):
    model, injection = held
    with st.phase("rollout"):
        seen = [*model.generate(), *model.generate(), model(torch.eye(8))]
    assert all(torch.equal(seen[0], x) for x in seen)
    with st.phase("rollout"):
        assert not torch.equal(model(torch.eye(8)), seen[0])
    assert injection.rollouts.total == 2

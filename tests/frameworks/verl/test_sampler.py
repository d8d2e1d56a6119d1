"""The order of things around a validation in a sampler, on a small model without an engine: what is counted, and in which phase."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.verl.sampler import SamplerExtension
from shaketable.integrations.vllm.worker import Shaker

pytestmark = pytest.mark.covers("verl", "a sampler's validations: counts by phase and step", "no engine")

PLAN = "gain:0.1@module.linear,phase=rollout+train+eval;gain:0.1@module.linear,point=weight,phase=rollout+train+eval"


class Sampler:
    """A worker of vLLM as our extension sees it, with a model of one layer."""

    def __init__(self):
        block = nn.Module()
        block.norm, block.up = nn.RMSNorm(4), nn.Linear(4, 4)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([block])
        self.model.forward = lambda x: block.up(block.norm(x))
        compiling = SimpleNamespace(mode=0, cudagraph_mode=None)
        config = SimpleNamespace(
            additional_config={}, compilation_config=compiling, parallel_config=SimpleNamespace(data_parallel_rank=0)
        )
        self.worker = SimpleNamespace(
            vllm_config=config,
            model_runner=SimpleNamespace(get_model=lambda: self.model),
            execute_model=lambda _: self.model(torch.randn(2, 4)),
        )
        self._shaketable = Shaker(self.worker)
        self.shaker = self._shaketable

    def switch_plan(self, on):
        SamplerExtension.switch_plan(self, on)

    def serve(self):
        with torch.inference_mode():
            self.worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=2))

    def fires(self, what, phase, site=0):
        return self.shaker.newest[what].ledger.to_dict()["sites"][site]["phases"].get(phase, {}).get("forward", 0)


@pytest.fixture
def sampler(monkeypatch):
    from shaketable.integrations.vllm import worker

    for name in ("refuse_captured", "refuse_adapted"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    made = Sampler()
    made.shaker.attach(Instructions(plan=PLAN, aqn="constant:0.1", total_steps=4))
    yield made
    made.shaker.clear()


def validate_both(sampler):
    """What the trainer tells a sampler for validate=both; the weights and fires of each of the two."""
    found = []
    for faulty in (False, True):
        sampler.switch_plan(faulty)
        sampler.shaker.set_phase("eval")
        before = sampler.fires("plan", "eval")
        sampler.serve()
        found.append((sampler.shaker.report()["written"], sampler.fires("plan", "eval") - before))
    return found


def test_a_validation_before_the_first_request_leaves_the_first_step_its_fires(sampler):
    """AQN is written once per step, and that is counted in the first step although a validation came before."""
    assert validate_both(sampler) == [(0, 0), (1, 1)]
    assert sampler.fires("aqn", "eval") == sampler.fires("aqn", "rollout") == 0
    sampler.shaker.set_phase("rollout")
    assert sampler.fires("aqn", "rollout") == 1
    sampler.serve()
    assert sampler.fires("plan", "rollout") == 1 and sampler.fires("plan", "rollout", site=1) == 1


def test_every_faulty_validation_counts_its_faults_of_weights(sampler):
    """The one before training and the one after the first step are of the same step of the noise."""
    validate_both(sampler)
    assert sampler.fires("plan", "eval", site=1) == 1
    sampler.shaker.set_phase("rollout")
    sampler.shaker.set_step(0)
    sampler.serve()
    assert validate_both(sampler) == [(0, 0), (1, 1)]
    assert sampler.fires("plan", "eval", site=1) == 2
    sampler.shaker.set_phase("rollout")
    sampler.shaker.set_step(1)
    assert sampler.fires("aqn", "rollout") >= 2

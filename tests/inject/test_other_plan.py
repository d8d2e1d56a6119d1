"""Another plan at the same sites: nothing is hooked or compiled anew, and the result is that of a fresh start."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from shaketable.inject.injection import Injection, exchange, has_same_sites
from shaketable.plan import Plan

IDS = torch.tensor([[3, 7, 11, 5]])
FIRST = "relative_gaussian:0.05@module.linear; gain:0.1@layer.1; gain:0.2@module.rmsnorm,point=weight"
SECOND = "dead_zone:0.05,scope=token@module.linear; relative_gaussian:0.1@layer.1; mxfp4@module.rmsnorm,point=weight"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("saturation:0.9,scope=token@layer.1,phase=eval", True),
        ("gain:0.1@layer.1,point=output", True),
        ("gain:0.1@layer.1,point=input", False),
        ("gain:0.1@layer.0", False),
        ("gain:0.1@layer.1,direction=both", False),
        ("gain:0.1@layer.1; gain:0.1@layer.1", False),
    ],
)
def test_sites_are_the_same_whatever_happens_there_and_when(other, same):
    assert has_same_sites(Plan.parse(other), Plan.parse("gain:0.5@layer.1")) is same


def attached(model, plan, seed):
    injection = Injection(Plan.parse(plan, seed=seed), rank=0, allow_inert=True, sampler=True)
    injection.attach(model)
    return injection.enable()


@torch.no_grad()
def test_a_compiled_model_computes_what_a_fresh_one_does_under_the_new_plan(tinier_llama, fresh_graphs):
    clean = tinier_llama(IDS).logits
    fresh = attached(tinier_llama, SECOND, seed=3)
    should, ledger = tinier_llama(IDS).logits, fresh.ledger.to_dict()
    fresh.close(check=False)

    injection = attached(tinier_llama, FIRST, seed=0)
    compiled = torch.compile(tinier_llama, backend="eager")
    first = compiled(IDS).logits
    before, compiled_so_far = injection.ledger, dict(counters["stats"])
    fires = before.forward

    exchange(injection, Plan.parse(SECOND, seed=3), rank=0)
    assert torch.equal(compiled(IDS).logits, clean)
    injection.enable()
    assert torch.equal(compiled(IDS).logits, should)
    assert dict(counters["stats"]) == compiled_so_far
    assert not torch.equal(first, should)
    assert before.forward == fires > 0
    assert [s["forward"] for s in injection.ledger.to_dict()["sites"]] == [s["forward"] for s in ledger["sites"]]
    assert [s["measured_magnitude"] for s in injection.ledger.to_dict()["sites"]] == pytest.approx(
        [s["measured_magnitude"] for s in ledger["sites"]]
    )
    injection.close(check=False)
    assert torch.equal(tinier_llama(IDS).logits, clean)

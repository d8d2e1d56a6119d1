"""Shares with a known answer: a plan of known strengths, and brute force with one clause at a time."""

import numpy as np
import pytest
import torch

from shaketable.inject import inject
from shaketable.mismatch.hf import HFEngine
from shaketable.mismatch.logprobs import completion_logits
from shaketable.mismatch.shares import ShareMeter
from tests.mismatch import pairs
from tests.mismatch.pairs import record

CLAUSES = {"linear": "gain:0.01@module.linear", "lm_head": "gain:0.02@module.lm_head,include=lm_head"}


def measured(model, rollouts, phases=("prefill",), trainer=torch.float32):
    records = [{phase: record(model, r.tokens, len(r.prompt), phase) for phase in phases} for r in rollouts]
    if "decode" in phases:
        for one, r in zip(records, rollouts, strict=True):
            one["prompt"] = record(model, r.prompt, len(r.prompt), "prefill")
    told = HFEngine(model).logprobs(rollouts, "batch of one")
    meter = ShareMeter(pairs.trainer(trainer).model)
    for rollout, one, logprobs in zip(rollouts, records, told, strict=True):
        meter.add(rollout, one, logprobs)
    return meter.result()


def brute_force(rollouts, plan):
    model = pairs.engine().model
    with inject(model, plan):
        shaken = list(completion_logits(model, rollouts, batch=1))
    clean = completion_logits(model, rollouts, batch=1)
    kl = []
    for a, b in zip(shaken, clean, strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1).numpy())
    return float(np.concatenate(kl).mean())


def test_known_strengths_on_two_families_are_recovered():
    rollouts = pairs.rollouts(pairs.engine())
    alone = {family: brute_force(rollouts, clause) for family, clause in CLAUSES.items()}
    model = pairs.engine().model
    with inject(model, ";".join(CLAUSES.values())):
        found = measured(model, rollouts)
    rows = {row.family: row for row in found.families}
    for family, kl in alone.items():
        share = kl / sum(alone.values())
        assert rows[family].low <= share <= rows[family].high
        assert rows[family].share == pytest.approx(share, abs=0.03)
    assert sum(row.share for row in found.families) == pytest.approx(1)
    assert found.leaders == [found.families[0].family]
    assert found.explained > 0.99
    together = brute_force(rollouts, ";".join(CLAUSES.values()))
    assert found.together == pytest.approx(together / sum(alone.values()), rel=0.05)


def test_logits_in_a_wider_dtype_are_a_difference_of_the_head():
    other = pairs.engine(torch.bfloat16)
    head = other.model.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float())
    rollouts = pairs.rollouts(other, count=2)
    found = measured(other.model, rollouts, trainer=torch.bfloat16)
    assert [row.family for row in found.families] == ["lm_head"]
    assert found.kl > 1e-9
    assert found.explained > 0.9

"""The statistics of attention, a cache that rounds, other shapes of decoders, experts, and the log-softmax."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.operators import Judge
from shaketable.mismatch.routing import compare_routing, routing
from tests.locate.architectures import build, tokens
from tests.mismatch import pairs, planted
from tests.mismatch.pairs import record


def wrong(model, dtype, other=None, phases=("prefill", "decode")):
    own = pairs.trainer().model if other is None else other
    judge = Judge(own, dtype)
    (drawn,) = pairs.rollouts(pairs.engine(), pairs.sampling(max_new_tokens=40, stop=()), count=1)
    for phase in phases:
        judge.judge(record(model, drawn.tokens, len(drawn.prompt), phase), phase)
    return judge.wrong()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_that_rounds_is_seen_in_the_attention_that_reads_it(monkeypatch, attention):
    model, update = pairs.engine(torch.bfloat16, attention).model, DynamicLayer.update

    def rounded(self, key, value, *args, **kwargs):
        key, value = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value))
        return update(self, key, value, *args, **kwargs)

    assert wrong(model, torch.bfloat16) == []
    monkeypatch.setattr(DynamicLayer, "update", rounded)
    found = wrong(model, torch.bfloat16)
    assert {row.kind for row in found} == {"attention"}
    assert found[0].name == "model.layers.0.self_attn"
    assert any("times what rounding makes" in row.text for row in found)


def test_scores_that_repeat_are_rounded_one_way_and_right():
    """In layer 0 a score depends on two tokens and their distance, so that few scores, and their roundings, repeat."""
    other = pairs.engine(torch.bfloat16, "eager")
    judge = Judge(pairs.trainer().model, torch.bfloat16)
    how = pairs.sampling(seed=27, max_new_tokens=28)
    drawn = sorted(pairs.rollouts(other, how, 8), key=lambda r: len(r.tokens))
    for rollout in (drawn[0], drawn[-1]):
        judge.judge(record(other.model, rollout.tokens, len(rollout.prompt), "decode"), "decode")
    assert judge.wrong() == []


def test_routing_by_layer():
    one, two = build("qwen3_moe"), build("qwen3_moe")
    ids = tokens()[0].tolist()
    first = routing(one, ids)
    assert all(row.differs == 0 for row in compare_routing(first, routing(two, ids)))
    with torch.no_grad():
        two.model.layers[1].mlp.gate.weight.neg_()
    rows = {row.layer: row.differs for row in compare_routing(first, routing(two, ids))}
    assert rows[0] == 0
    assert rows[1] > 0.5
    assert routing(pairs.trainer().model, [3, 4]) is None


# ---- the last operator, from logits to the log-probability that is returned


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_tells_it_for_every_token_of_the_completion(phase):
    other = pairs.engine()
    (drawn,) = pairs.rollouts(other, count=1)
    last = other.record([drawn], phase)[0].calls[-1]
    assert last.inputs["ids"].tolist() == drawn.completion
    assert last.output.flatten().tolist() == pytest.approx(drawn.logprobs, abs=1e-4)
    assert other.record([Rollout(drawn.prompt, [], [])], "prefill")[0].calls[-1].kind == "lm_head"


@pytest.mark.parametrize(
    ("plant", "looks"), [(planted.coarse_log_softmax, "computed in bfloat16"), (planted.shifted_log_softmax, None)]
)
def test_a_wrong_log_softmax_is_named(plant, looks):
    other = pairs.engine()
    other.chosen = plant
    found = pairs.verdict(other, recorded=1)
    assert (found.verdict, found.stage) == ("DEFECT", "operators"), found.sentence
    assert {row.name for row in found.operators.wrong} == {"log_softmax"}
    assert "the engine's log_softmax" in found.sentence
    assert looks in (None, found.operators.wrong[0].looks_like)
    assert found.shares.families[0].family == "log_softmax"
    assert found.shares.explained > 0.99

"""The statistics of attention, a cache that rounds, other shapes of decoders, and experts."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from shaketable.errors import UnavailableError
from shaketable.mismatch.operators import Judge, Recompute
from shaketable.mismatch.routing import compare_routing, routing
from tests.locate.architectures import build, tokens
from tests.mismatch import pairs
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


@pytest.mark.parametrize("seed", [9, 27, 39])
def test_scores_that_repeat_are_rounded_one_way_and_right(seed):
    """In layer 0 a score depends on two tokens and their distance, so that few scores, and their roundings, repeat."""
    other = pairs.engine(torch.bfloat16, "eager")
    judge = Judge(pairs.trainer().model, torch.bfloat16)
    how = pairs.sampling(seed=seed, temperature=0.7 if seed // 12 % 2 else 1.0, max_new_tokens=28)
    drawn = sorted(pairs.rollouts(other, how, 8), key=lambda r: len(r.tokens))
    for rollout in (drawn[0], drawn[-1]):
        judge.judge(record(other.model, rollout.tokens, len(rollout.prompt), "decode"), "decode")
    assert judge.wrong() == []


def test_eager_bfloat16_is_not_mistaken_for_a_wrong_scale():
    model = pairs.engine(torch.bfloat16, "eager").model
    assert wrong(model, torch.bfloat16) == []
    model.model.layers[5].self_attn.scaling *= 0.99
    (first, *_) = found = wrong(model, torch.bfloat16)
    assert {row.name for row in found} == {"model.layers.5.self_attn"}
    assert "factor of 0.9" in first.text


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_other_decoders_of_this_shape(name):
    model = build(name)
    ids = tokens()[0].tolist()
    judge, again = Judge(model, torch.float32), Recompute(model)
    for phase in ("prefill", "decode"):
        calls = record(model, ids, 10, phase)
        judge.judge(calls, phase)
        for call in calls:
            made = again.result(call)
            assert torch.allclose(made, call.output.reshape(made.shape), rtol=1e-3, atol=1e-4), call.name
    assert judge.wrong() == []
    assert judge.unjudged == {}


def test_experts_are_judged_as_a_whole_with_the_routers_own_logits():
    model = build("qwen3_moe")
    ids = tokens()[0].tolist()
    calls = record(model, ids, 10, "decode")
    assert {"router", "experts"} <= {call.kind for call in calls}
    judge, again = Judge(model, torch.float32), Recompute(model)
    judge.judge(calls, "decode")
    assert judge.wrong() == []
    assert not judge.unjudged and judge.kinds()["experts"].operators == 3
    for call in calls:
        assert torch.allclose(again.result(call), call.output.reshape(len(call.output), -1), rtol=1e-3, atol=1e-4), call.name


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


def test_another_shape_is_refused_in_one_line():
    with pytest.raises(UnavailableError, match="not told apart"):
        record(build("gpt2"), [1, 2, 3], 1, "prefill")

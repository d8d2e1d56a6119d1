"""The last operator, from logits to the log-probability that is returned: judged, named, and a family of the shares."""

from dataclasses import replace

import pytest
import torch

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.shares import ShareMeter
from shaketable.numerics.decoder_operators import log_softmax, log_softmax_call
from tests.mismatch import pairs, planted


def call(logits, ids, made):
    return log_softmax_call(logits, ids, made.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_tells_it_for_every_token_of_the_completion(phase):
    other = pairs.engine()
    (drawn,) = pairs.rollouts(other, count=1)
    last = other.record([drawn], phase)[0].calls[-1]
    assert last.inputs["ids"].tolist() == drawn.completion
    assert last.output.flatten().tolist() == pytest.approx(drawn.logprobs, abs=1e-4)
    assert other.record([Rollout(drawn.prompt, [], [])], "prefill")[0].calls[-1].kind == "lm_head"


@pytest.mark.parametrize("size", [64, 49_152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_float32_is_inside_in_any_order_and_half_of_the_vocabulary_is_not(size, spread):
    logits = torch.randn(16, size, generator=torch.Generator().manual_seed(0)) * spread
    ids = list(range(16))
    terms = (logits - logits.amax(-1, keepdim=True)).exp()
    one_by_one = logits - logits.amax(-1, keepdim=True) - terms.cumsum(-1)[:, -1:].log()
    for made in (logits.log_softmax(-1), logits - logits.logsumexp(-1, keepdim=True), one_by_one):
        one = call(logits, ids, made)
        assert not bool(log_softmax(one).outside(one.output).any())
    half = call(logits, ids, logits - logits[:, : size // 2].logsumexp(-1, keepdim=True))
    assert bool(log_softmax(half).outside(half.output).any())


@pytest.mark.parametrize(
    ("plant", "looks"), [(planted.coarse_log_softmax, "computed in bfloat16"), (planted.shifted_log_softmax, None)]
)
def test_a_wrong_log_softmax_is_named(plant, looks):
    other = pairs.engine()
    other.log_softmax = plant
    found = pairs.verdict(other, recorded=1)
    assert (found.verdict, found.stage) == ("DEFECT", "operators"), found.sentence
    assert {row.name for row in found.operators.wrong} == {"log_softmax"}
    assert "the engine's log_softmax" in found.sentence
    assert looks in (None, found.operators.wrong[0].looks_like)
    assert found.shares.families[0].family == "log_softmax"
    assert found.shares.reproduced.explained > 0.99


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_temperature_and_processing_are_not_mistaken_for_it(mode):
    found = pairs.verdict(pairs.engine(), pairs.sampling(temperature=0.7, top_p=0.9, logprobs_mode=mode), recorded=1)
    assert found.verdict == "LEGAL", found.sentence
    assert found.operators.kinds["log_softmax"].outside == 0


def test_its_share_is_that_of_its_shift():
    rollout: Rollout = pairs.rollouts(pairs.engine(), count=1)[0]
    other = pairs.engine(torch.bfloat16)
    other.log_softmax = planted.shifted_log_softmax
    records = {"prefill": other.record([rollout], "prefill")[0].calls}
    meter = ShareMeter(pairs.trainer().model)
    meter.add(rollout, records, other.logprobs([rollout])[0])
    found = meter.result()
    rows = {row.family: row for row in found.families}
    assert rows["log_softmax"].kl == pytest.approx(1e-6 / 2, rel=1e-3)
    assert not any("log_softmax" in clause for clause in found.plan)


def test_an_engine_that_does_not_tell_it_is_said_not_to():
    class Silent(type(pairs.engine())):
        def record(self, rollouts, phase, rows=None):
            told = super().record(rollouts, phase, rows)
            return [replace(one, calls=[c for c in one.calls if c.kind != "log_softmax"]) for one in told]

    found = pairs.verdict(Silent(pairs.engine().model), recorded=1)
    assert any(line.startswith("log_softmax, from logits") for line in found.conclusion.not_looked_at)
    assert not any("log_softmax" in line for line in pairs.verdict(pairs.engine(), recorded=1).conclusion.not_looked_at)

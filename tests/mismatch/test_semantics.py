"""Each way of meaning another probability is named, and the healthy way is not."""

from dataclasses import replace

import pytest
import torch

from shaketable.mismatch.logprobs import read
from shaketable.mismatch.rounding import Rounding
from shaketable.mismatch.semantics import try_hypotheses
from tests.mismatch import pairs

LIMITS = {"temperature": 0.7, "top_p": 0.9, "top_k": 12}


def named(declared, rollouts):
    trainer = pairs.trainer()
    logits = list(trainer.logits(rollouts))
    reading = read(logits, rollouts, declared)
    rounding = Rounding(trainer, rollouts, declared, torch.float32, reading)
    return try_hypotheses(trainer, rollouts, declared, rounding.scale, logits, reading.edges).named


def returned(**how):
    return pairs.rollouts(pairs.engine(), pairs.sampling(**how))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_what_was_declared_is_not_named(mode):
    how = pairs.sampling(logprobs_mode=mode, **LIMITS)
    assert named(how, pairs.rollouts(pairs.engine(), how)) is None


def test_processed_instead_of_raw():
    drawn = returned(logprobs_mode="processed", **LIMITS)
    assert named(pairs.sampling(**LIMITS), drawn).name == "processed log-probabilities"


def test_raw_instead_of_processed():
    drawn = returned(**LIMITS)
    assert named(pairs.sampling(logprobs_mode="processed", **LIMITS), drawn).name == "raw log-probabilities"


def test_temperature_that_was_not_applied():
    drawn = returned(logprobs_mode="processed", top_p=0.9)
    assert named(pairs.sampling(logprobs_mode="processed", temperature=0.7, top_p=0.9), drawn).name == "temperature not applied"


def test_top_p_that_nobody_declared():
    drawn = returned(logprobs_mode="processed", top_p=0.9)
    assert "top_p=0.9" in named(pairs.sampling(), drawn).name


def test_a_temperature_that_nobody_declared_is_found():
    drawn = returned(logprobs_mode="processed", temperature=1.37)
    assert named(pairs.sampling(), drawn).name == "temperature 1.37"


def test_a_repetition_penalty_that_is_in_the_log_probabilities():
    drawn = returned(logprobs_mode="processed", repetition_penalty=1.3)
    assert named(pairs.sampling(repetition_penalty=1.3), drawn).name == "processed log-probabilities"


def test_a_logit_bias_that_was_forgotten():
    drawn = returned(logprobs_mode="processed", temperature=0.8)
    how = pairs.sampling(logprobs_mode="processed", temperature=0.8, logit_bias={20: 3.0})
    assert named(how, drawn).name == "logit bias not applied"


def test_log_probabilities_of_the_next_token():
    drawn = [replace(r, logprobs=[*r.logprobs[1:], -1.0]) for r in returned()]
    assert named(pairs.sampling(), drawn).name == "of the next token"


def test_a_stop_token_that_one_side_does_not_count():
    drawn = [replace(r, logprobs=[*r.logprobs[:-1], -30.0]) if r.finish == "stop" else r for r in returned(max_new_tokens=60)]
    assert any(r.finish == "stop" for r in drawn)
    assert named(pairs.sampling(), drawn).name == "stop token not counted"


def test_a_cut_at_a_length():
    drawn = []
    for r in returned(max_new_tokens=60, stop=()):
        kept = 64 - len(r.prompt)
        drawn.append(replace(r, logprobs=[*r.logprobs[:kept], *([-40.0] * (len(r.completion) - kept))]))
    assert named(pairs.sampling(), drawn).name == "cut at 64 tokens"


def test_a_prompt_of_which_the_engine_reads_the_end_only():
    read = [p[-8:] for p in pairs.prompts()]
    drawn = [replace(r, prompt=p) for r, p in zip(pairs.engine().sample(read, pairs.sampling()), pairs.prompts(), strict=True)]
    assert named(pairs.sampling(), drawn).name == "the last 8 tokens"


def test_a_bos_token_that_the_engine_adds():
    tokenizer = pairs.trainer().tokenizer
    was, tokenizer.bos_token = tokenizer.bos_token, "0"
    try:
        bos = tokenizer.bos_token_id
        seen = pairs.engine().sample([[bos, *p] for p in pairs.prompts()], pairs.sampling())
        drawn = [replace(r, prompt=r.prompt[1:]) for r in seen]
        assert named(pairs.sampling(), drawn).name == "one BOS more"
        assert named(pairs.sampling(), seen) is None
    finally:
        tokenizer.bos_token = was

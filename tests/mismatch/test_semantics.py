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


@pytest.mark.parametrize(
    ("drawn", "declared", "name"),
    [
        ({"logprobs_mode": "processed", **LIMITS}, LIMITS, "processed log-probabilities"),
        (LIMITS, {"logprobs_mode": "processed", **LIMITS}, "raw log-probabilities"),
        (
            {"logprobs_mode": "processed", "top_p": 0.9},
            {"logprobs_mode": "processed", "temperature": 0.7, "top_p": 0.9},
            "temperature not applied",
        ),
        ({"logprobs_mode": "processed", "top_p": 0.9}, {}, "top_p=0.9"),
        ({"logprobs_mode": "processed", "temperature": 1.37}, {}, "temperature 1.37"),
    ],
)
def test_sampling_that_is_not_what_was_declared_is_named(drawn, declared, name):
    assert named(pairs.sampling(**declared), returned(**drawn)).name == name


def test_log_probabilities_of_the_next_token():
    drawn = [replace(r, logprobs=[*r.logprobs[1:], -1.0]) for r in returned()]
    assert named(pairs.sampling(), drawn).name == "of the next token"


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

"""The engine that is a Hugging Face model: what it returns is what it says it returns."""

import pytest
import torch

from shaketable.cli.mismatch import open_engine
from shaketable.errors import ShaketableError
from shaketable.mismatch.engine import Sampling
from tests.mismatch import pairs


def test_samples_are_those_of_the_seed():
    one, two, other = (pairs.rollouts(pairs.engine(), pairs.sampling(seed=s)) for s in (1, 1, 2))
    assert one == two != other


def test_greedy_is_greedy():
    other = pairs.engine()
    (drawn,) = other.sample([pairs.prompts()[0]], Sampling(6, temperature=0.0))
    ids = torch.tensor([drawn.tokens])
    best = other.model(input_ids=ids).logits[0].argmax(-1).tolist()
    assert drawn.completion == best[len(drawn.prompt) - 1 : -1]


def test_recording_changes_nothing_and_leaves_nothing_behind():
    other = pairs.engine()
    drawn = pairs.rollouts(other, count=2)
    before = other.logprobs(drawn)
    for phase in ("prefill", "decode"):
        other.record(drawn, phase, [0])
    assert other.logprobs(drawn) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.model.modules())


def test_decoding_is_recorded_token_by_token():
    other = pairs.engine()
    (drawn,) = pairs.rollouts(other, count=1)
    rows = len(drawn.completion)
    for call in other.record([drawn], "decode")[0].calls:
        assert len(call.output) == rows, call.name
        if call.kind == "attention":
            assert len(call.inputs["k"]) == len(call.inputs["v"]) == len(drawn.tokens)
            assert call.inputs["positions"].tolist() == list(range(len(drawn.prompt), len(drawn.tokens)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtyp": "bfloat16"}, "did you mean 'dtype'"),
        ({"dtype": "int8"}, "dtype"),
        ({"model": "no/such/folder/"}, "does not exist"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_in_one_line(arguments, says):
    with pytest.raises(ShaketableError, match=says) as caught:
        open_engine("hf", "nano", arguments)
    assert "\n" not in str(caught.value)

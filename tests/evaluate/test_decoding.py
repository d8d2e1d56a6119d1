"""Decoding: the tokens of `model.generate`, whatever the batch; the sampler's own log-probabilities; nobody else's randomness."""

import pytest
import torch

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Decoder, decode_all
from shaketable.models import load_model
from shaketable.sites.phases import phase

QUESTIONS = ["144+725=", "7+8=", "900-1=", "12+34=", "555+445=", "31-997=", "100+100=", "8-3=", "472+338=", "60+6="]


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


@pytest.fixture(scope="module")
def prompts(nano):
    return [nano[1](q)["input_ids"] for q in QUESTIONS]


def forced(model, prompt, completion, temperature):
    """log softmax of a forward over prompt and completion, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()


def generated(model, tokenizer, prompt, limit):
    """What transformers writes to one prompt, by itself and not padded."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return out[0, len(prompt) :].tolist()


def test_greedy_is_what_transformers_generates(nano, prompts):
    model, tokenizer = nano
    assert len({len(p) for p in prompts}) > 3, "rows are padded"
    found = Decoder.of(model, tokenizer, 12).decode(model, prompts)
    assert [c.tokens for c in found] == [generated(model, tokenizer, p, 12) for p in prompts]
    assert len({len(c.tokens) for c in found}) > 1, "rows end at different steps, and results keep their order"


@pytest.mark.parametrize("plan", [None, "truncation:4@module.linear"])
def test_the_batch_size_changes_no_token(nano, prompts, plan):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12)

    def decoded(size):
        if plan is None:
            return decode_all(decoder, model, prompts, batch_size=size)
        with st.inject(model, plan), phase("eval"):
            return decode_all(decoder, model, prompts, batch_size=size)

    alone = decoded(1)
    for size in (3, 4, 16):
        together = decoded(size)
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        if plan is None:
            for a, b in zip(together, alone, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    clean = decode_all(decoder, model, prompts, batch_size=1)
    assert [c.tokens for c in clean] == [generated(model, tokenizer, p, 12) for p in prompts], "in the order of the prompts"
    assert (clean == alone) == (plan is None), "the fault was there"


@pytest.mark.parametrize("temperature", [0.0, 1.7])
def test_log_probabilities_are_those_of_a_forward_over_the_whole_text(nano, prompts, temperature):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12, temperature)
    found = decoder.decode(model, prompts, samples=2, generator=torch.Generator().manual_seed(1))
    for i, completion in enumerate(found):
        expected = forced(model, prompts[i // 2], completion.tokens, temperature or 1.0)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_tokens_depend_on_the_generator_and_never_touch_the_global_one(nano, prompts):
    model, tokenizer = nano
    decoder, before = Decoder.of(model, tokenizer, 12, 1.5), torch.get_rng_state()
    draws = [decoder.decode(model, prompts, samples=2, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0] == draws[1] != draws[2]
    decoder.decode(model, prompts)
    Decoder.of(model, tokenizer, 12).decode(model, prompts)
    assert draws[0] == decoder.decode(model, prompts, samples=2, generator=torch.Generator().manual_seed(1))


def test_an_empty_prompt_is_one_line(nano):
    with pytest.raises(ShaketableError, match="no tokens"):
        Decoder.of(*nano, 3).decode(nano[0], [[4], []])

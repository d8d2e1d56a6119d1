"""Replayed decoding on a GPU: the tokens of the same steps without graphs, weights and noise as they are now, what cannot be captured."""

import pytest
import torch

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.cuda_graph import WARM, Captured
from shaketable.evaluate.decoding.dynamic import Decoder
from shaketable.evaluate.decoding.static import StaticDecoding
from shaketable.models import load_model
from shaketable.sites.phases import phase
from tests.evaluate.decoding.nano_prompts import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def nano():
    return load_model("nano", device="cuda")


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


def pair(decoder):
    return StaticDecoding(decoder), StaticDecoding(decoder, graphs=False)


def test_greedy_in_float32_is_that_of_the_decoder(nano, prompts):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12)
    static = StaticDecoding(decoder)
    for _ in range(3):
        found, expected = static.decode(model, prompts, samples=2), decoder.decode(model, prompts, samples=2)
        assert tokens(found) == tokens(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert static.word == "static, captured"


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_graphs_change_no_token_and_no_probability(nano, prompts, cast, temperature):
    model, tokenizer = nano
    with_graphs, without = pair(Decoder.of(model, tokenizer, 12, temperature))
    for seed in range(4):
        found = []
        for how in (with_graphs, without):
            with torch.autocast("cuda", cast or torch.bfloat16, enabled=cast is not None):
                found.append(how.decode(model, prompts, samples=4, generator=generator(seed)))
        assert found[0] == found[1]
    assert (with_graphs.word, without.word) == ("static, captured", "static")


@pytest.mark.parametrize("cast", [False, True])
def test_replays_see_the_weights_that_an_optimizer_has_changed(nano, prompts, cast):
    model, tokenizer = nano
    with_graphs, without = pair(Decoder.of(model, tokenizer, 12, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    seen = []
    for seed in range(4):
        found = []
        for how in (with_graphs, without):
            with torch.autocast("cuda", torch.bfloat16, enabled=cast):
                found.append(how.decode(model, prompts, samples=2, generator=generator(0)))
        assert found[0] == found[1], seed
        seen.append(found[0])
        model(torch.tensor([prompts[0]], device="cuda")).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1] != seen[2] != seen[3]
    assert with_graphs.word == "static, captured" and len(with_graphs._kept) == 1


def test_replays_see_the_noise_that_is_held_for_a_rollout(nano, prompts):
    """Drawn anew at every rollout while the prompts are read; the captured steps must read what was drawn."""
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12, 1.0)
    runs = []
    for graphs in (True, False):
        static, found = StaticDecoding(decoder, graphs=graphs), []
        with st.AQN(st.Constant(0.3)).attach(model, 5) as noise:
            for step in range(4):
                noise.step = step
                with phase("rollout"):
                    found.append(static.decode(model, prompts, samples=2, generator=generator(0)))
        runs.append(found)
    assert runs[0] == runs[1]
    assert runs[0][2] != runs[0][3]


def test_a_fault_on_activations_acts_in_replays_as_it_does_without(nano, prompts):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12)
    clean = decoder.decode(model, prompts)
    runs = []
    for graphs in (True, False):
        static = StaticDecoding(decoder, graphs=graphs)
        with st.inject(model, "truncation:4@module.linear"), phase("rollout"):
            runs.append([static.decode(model, prompts) for _ in range(3)])
    assert [tokens(found) for found in runs[0]] == [tokens(found) for found in runs[1]]
    assert runs[0][0] != clean


def test_noise_is_fresh_at_every_step_and_rollout(nano, prompts):
    """One prompt many times, greedy: with noise on activations the rows differ, and so do rollouts."""
    model, _ = nano
    static = StaticDecoding(Decoder(12, (), 0))
    with st.inject(model, "relative_gaussian:0.3@module.linear,phase=rollout") as ledger:
        found = []
        for _ in range(4):
            with phase("rollout"):
                found.append(static.decode(model, [prompts[0]], samples=64))
    assert len({tuple(c.logprobs) for c in found[3]}) > 32
    assert found[1] != found[2] != found[3]
    assert ledger.forward > 0


def test_a_plan_that_is_switched_off_is_off_in_replays_too(nano, prompts):
    model, tokenizer = nano
    static = StaticDecoding(Decoder.of(model, tokenizer, 12))
    clean = static.decode(model, prompts)
    injection = st.inject(model, "gain:0.5@layer.3", allow_inert=True).enable()
    with phase("rollout"):
        shaken = [static.decode(model, prompts) for _ in range(2)]
    injection.disable()
    with phase("rollout"):
        off = static.decode(model, prompts)
    injection.close()
    assert static.decode(model, prompts) == clean == off
    assert shaken[0] == shaken[1] != clean


def test_what_cannot_be_captured_is_done_step_by_step_with_a_word(nano, prompts):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12, 1.0)
    static = StaticDecoding(decoder)
    handle = model.model.norm.register_forward_hook(lambda m, args, out: out * float(out.isfinite().all()))
    try:
        found = [static.decode(model, prompts, generator=generator(s)) for s in (0, 1)]
        expected = [StaticDecoding(decoder, graphs=False).decode(model, prompts, generator=generator(s)) for s in (0, 1)]
    finally:
        handle.remove()
    assert found == expected
    assert static.word.startswith("static, not captured: ")
    assert torch.rand(3, device="cuda").shape == (3,), "torch's own generator still works"


def test_logits_that_are_not_numbers_are_an_error_in_replays_too(nano, prompts):
    model, tokenizer = nano
    static = StaticDecoding(Decoder.of(model, tokenizer, 12, 1.0))
    static.decode(model, prompts, generator=generator(0))
    static.decode(model, prompts, generator=generator(0))
    with torch.no_grad():
        kept = model.model.norm.weight[0].clone()
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ShaketableError, match="the sampler's logits are no longer finite"):
        static.decode(model, prompts, generator=generator(0))
    with torch.no_grad():
        model.model.norm.weight[0] = kept
    assert tokens(static.decode(model, prompts, generator=generator(0)))


def test_the_first_calls_are_real_calls():
    x = torch.zeros(4, device="cuda")
    step = Captured(lambda: x.add_(1), x.device)
    for n in range(1, WARM + 4):
        step()
        assert x.tolist() == [n] * 4
    assert step.is_captured and step.replays == 3

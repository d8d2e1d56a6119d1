"""Decoding in memory that stays in place: the tokens of `Decoder`, ends and padding, new weights seen, errors kept."""

from collections import Counter

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.dynamic import Decoder
from shaketable.evaluate.decoding.static import BUCKET, KEPT, StaticDecoding, unfit
from shaketable.evaluate.tasks import load_task, sample
from shaketable.models import load_model
from shaketable.sites.phases import phase
from tests.evaluate.decoding.nano_prompts import forced, tokens


def assert_same(found, expected):
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("padded", [True, False])
def test_greedy_is_that_of_the_decoder(nano, prompts, samples, padded):
    model, tokenizer = nano
    asked = prompts if padded else [p for p in prompts if len(p) == 8]
    decoder = Decoder.of(model, tokenizer, 12)
    expected = decoder.decode(model, asked, samples=samples)
    static = StaticDecoding(decoder)
    assert_same(static.decode(model, asked, samples=samples), expected)
    assert (len({len(p) for p in asked}) > 1) == padded == (len({len(c.tokens) for c in expected}) > 1)
    assert static.word == "static"


def test_memory_is_used_again_and_carries_nothing_over(nano, prompts):
    """Other prompts of another width in the same memory, and then the first ones again."""
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12)
    static = StaticDecoding(decoder)
    first = static.decode(model, prompts)
    narrow = [p for p in prompts if len(p) < 7] * 2
    narrow = (narrow * 10)[: len(prompts)]
    assert_same(static.decode(model, narrow), decoder.decode(model, narrow))
    assert static.decode(model, prompts) == first
    assert len(static._kept) == 1


def test_what_is_not_a_number_does_not_stay_in_memory(nano, prompts):
    model, tokenizer = nano
    static = StaticDecoding(Decoder.of(model, tokenizer, 12))
    first = static.decode(model, prompts)
    (rows,) = static._kept.values()
    for layer in rows.layers:
        layer.values.fill_(torch.nan)
        layer.keys.fill_(torch.inf)
    assert static.decode(model, prompts) == first


def test_a_wide_prompt_has_its_own_memory_and_only_some_shapes_are_kept(nano, prompts):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 6)
    static = StaticDecoding(decoder)
    wide = [p * (BUCKET // len(p) + 1) for p in prompts]
    assert_same(static.decode(model, wide), decoder.decode(model, wide))
    assert_same(static.decode(model, prompts), decoder.decode(model, prompts))
    assert [rows.slots for rows in static._kept.values()] == [2 * BUCKET, BUCKET]
    for n in range(1, KEPT + 2):
        static.decode(model, prompts[:n])
    assert len(static._kept) == KEPT


def test_eager_attention_is_served_too(prompts):
    model, tokenizer = load_model("nano")
    model.set_attn_implementation("eager")
    decoder = Decoder.of(model, tokenizer, 12)
    static = StaticDecoding(decoder)
    assert_same(static.decode(model, prompts, samples=2), decoder.decode(model, prompts, samples=2))
    assert static.word == "static"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_row_ends_at_its_end_token_or_at_the_limit(nano, prompts, limit):
    model, tokenizer = nano
    for ends in (Decoder.of(model, tokenizer, 1).ends, ()):
        decoder = Decoder(limit, ends, tokenizer.pad_token_id)
        assert_same(StaticDecoding(decoder).decode(model, prompts), decoder.decode(model, prompts))


def test_it_stops_soon_after_the_last_row_has_ended(nano, prompts):
    model, tokenizer = nano
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        found = StaticDecoding(Decoder.of(model, tokenizer, 60)).decode(model, prompts)
    finally:
        handle.remove()
    longest = max(len(c.tokens) for c in found)
    assert longest <= len(calls) < longest + 5 < 60


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probabilities_are_those_of_a_forward_over_the_whole_text(nano, prompts, temperature):
    model, tokenizer = nano
    static = StaticDecoding(Decoder.of(model, tokenizer, 12, temperature))
    found = static.decode(model, prompts, samples=2, generator=torch.Generator().manual_seed(1))
    for i, completion in enumerate(found):
        expected = forced(model, prompts[i // 2], completion.tokens, temperature or 1.0)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_samples_are_separate_draws_from_the_distribution_of_their_prompt(nano, prompts):
    model, tokenizer = nano
    n, prompt = 3000, prompts[8]
    static = StaticDecoding(Decoder.of(model, tokenizer, 2, 4.0))
    found = static.decode(model, [prompt], samples=n, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = (model(torch.tensor([prompt])).logits[0, -1].double() / 4.0).softmax(-1)
    assert_drawn_from(p, [c.tokens[0] for c in found])
    first = Counter(c.tokens[0] for c in found).most_common(1)[0][0]
    with torch.no_grad():
        q = (model(torch.tensor([[*prompt, first]])).logits[0, -1].double() / 4.0).softmax(-1)
    assert_drawn_from(q, [c.tokens[1] for c in found if c.tokens[0] == first])
    pairs = Counter(a.tokens == b.tokens for a, b in zip(found[::2], found[1::2], strict=True))[True] / (n / 2)
    assert pairs < 0.5, "neighbours are not copies"


def assert_drawn_from(p, drawn):
    """By chi-square, over the tokens that are expected five times and the rest together."""
    n, seen = len(drawn), Counter(drawn)
    often = [t for t in range(len(p)) if float(p[t]) * n >= 5]
    assert len(often) > 3
    counts, shares = [seen[t] for t in often], [float(p[t]) for t in often]
    expected = [*(s * n for s in shares), n * (1 - sum(shares))]
    assert stats.chisquare([*counts, n - sum(counts)], expected).pvalue > 1e-3


def test_top_k_leaves_the_rest_out(nano, prompts):
    model, _ = nano
    decoder = Decoder(1, (), 0, 5.0, 3)
    found = StaticDecoding(decoder).decode(model, [prompts[0]], samples=500, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        best = model(torch.tensor([prompts[0]])).logits[0, -1].topk(3).indices.tolist()
    assert {c.tokens[0] for c in found} == set(best)


def test_tokens_depend_on_the_generator_and_never_touch_the_global_one(nano, prompts):
    model, tokenizer = nano
    static, before = StaticDecoding(Decoder.of(model, tokenizer, 12, 1.5)), torch.get_rng_state()
    draws = [static.decode(model, prompts, samples=2, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0] == draws[1] != draws[2]


def test_weights_that_an_optimizer_has_changed_are_seen(prompts):
    model, tokenizer = load_model("nano")
    decoder = Decoder.of(model, tokenizer, 12)
    static = StaticDecoding(decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    answers = []
    for _ in range(3):
        found = static.decode(model, prompts)
        assert_same(found, decoder.decode(model, prompts))
        answers.append(tokens(found))
        model(torch.tensor([prompts[0]])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert answers[0] != answers[1] != answers[2] and len(static._kept) == 1


def test_weights_that_an_optimizer_has_changed_are_seen_under_autocast(prompts):
    """Autocast keeps casts of weights; none may outlive its rollout."""
    model, tokenizer = load_model("nano")
    decoder = Decoder.of(model, tokenizer, 12)
    static, answers = StaticDecoding(decoder), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = static.decode(model, prompts)
        with torch.autocast("cpu", torch.bfloat16):
            assert found == StaticDecoding(decoder).decode(model, prompts)
            answers.append((tokens(found), tokens(decoder.decode(model, prompts))))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    assert answers[0][0] == answers[0][1], "in bfloat16 too, where nothing is close to a tie"
    assert answers[0][0] != answers[1][0] and len(static._kept) == 1


def test_weights_that_are_put_elsewhere_get_new_memory(prompts):
    model, tokenizer = load_model("nano")
    static = StaticDecoding(Decoder.of(model, tokenizer, 4))
    static.decode(model, prompts)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    static.decode(model, prompts)
    assert len(static._kept) == 2


def test_hooks_that_are_set_or_taken_off_get_new_memory(prompts):
    """A step that was captured without a plan must not be replayed under it, nor the other way round."""
    model, tokenizer = load_model("nano")
    static = StaticDecoding(Decoder.of(model, tokenizer, 4))
    clean = static.decode(model, prompts)
    with st.inject(model, "gain:0.5@layer.3"), phase("rollout"):
        assert static.decode(model, prompts) != clean
        assert len(static._kept) == 2
    assert static.decode(model, prompts) == clean


@pytest.mark.parametrize("plan", ["truncation:4@module.linear", "mxfp4@module.linear,point=weight", "gain:0.5@layer.3"])
def test_a_deterministic_fault_acts_in_every_step_as_in_the_decoder(nano, prompts, plan):
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12)
    clean = decoder.decode(model, prompts)
    with st.inject(model, plan), phase("rollout"):
        expected = decoder.decode(model, prompts)
        assert_same(StaticDecoding(decoder).decode(model, prompts), expected)
    assert tokens(expected) != tokens(clean) or expected[0].logprobs != clean[0].logprobs


def test_noise_that_is_held_for_a_rollout_is_one_noise(nano, prompts):
    """Every step of a rollout has the weights that its prompts were read with, and the next rollout has others."""
    model, tokenizer = nano
    static = StaticDecoding(Decoder.of(model, tokenizer, 12))
    with st.AQN(st.Constant(0.2)).attach(model, 4) as noise:
        with phase("rollout"):
            first = static.decode(model, prompts)
        with phase("rollout"):
            second = static.decode(model, prompts)
        assert noise.ledger.forward == 2 * 17
    assert [c.logprobs for c in first] != [c.logprobs for c in second]


def test_logits_that_are_not_numbers_are_the_same_error(prompts):
    model, tokenizer = load_model("nano")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    decoder = Decoder.of(model, tokenizer, 4, 1.0)
    for how in (decoder, StaticDecoding(decoder)):
        with pytest.raises(ShaketableError, match="the sampler's logits are no longer finite"):
            how.decode(model, prompts, generator=torch.Generator().manual_seed(0))


def test_rows_that_have_ended_may_be_anything(nano, prompts):
    """Once a row has ended, what the model makes of its padding is nobody's error."""
    model, tokenizer = nano
    decoder = Decoder.of(model, tokenizer, 12, 1e-3)
    static = StaticDecoding(decoder)
    expected = tokens(static.decode(model, prompts, generator=torch.Generator().manual_seed(0)))
    lengths = torch.tensor([len(t) for t in expected])
    step = [0]

    def spoil(module, args, output):
        output.logits[(lengths <= step[0]).nonzero().squeeze(1)] = torch.nan
        step[0] += 1

    handle = model.register_forward_hook(spoil)
    try:
        assert tokens(static.decode(model, prompts, generator=torch.Generator().manual_seed(0))) == expected
    finally:
        handle.remove()
    assert step[0] > int(lengths.min()), "some rows had ended"


def test_an_empty_prompt_is_one_line(nano):
    with pytest.raises(ShaketableError, match="no tokens"):
        StaticDecoding(Decoder.of(*nano, 3)).decode(nano[0], [[4], []])


def test_a_sliding_window_is_left_to_the_decoder():
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**small, num_key_value_heads=1, sliding_window=4)).eval()
    decoder, asked = Decoder(8, (), 0), [[3, 4, 5, 6, 7, 8], [9, 8]]
    static = StaticDecoding(decoder)
    assert static.decode(model, asked) == decoder.decode(model, asked)
    assert static.word.startswith("dynamic: the model's cache has layers of the kind DynamicSlidingWindowLayer")
    plain = LlamaForCausalLM(LlamaConfig(**small)).eval()
    assert unfit(plain) is None
    plain.config._attn_implementation = "flex_attention"
    assert unfit(plain) == "the attention flex_attention takes no mask of single slots"


def test_other_models_are_served(nano):
    """Grouped heads, biases and other norms: a random Qwen2 and a random Qwen3."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    small = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for kind, config in ((Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)):
        torch.manual_seed(1)
        model = kind(config(**small, num_key_value_heads=2)).eval()
        decoder, asked = Decoder(9, (7,), 0), [[3, 4, 5], [9], [11, 12, 13, 14, 15, 16]]
        static = StaticDecoding(decoder)
        assert_same(static.decode(model, asked, samples=2), decoder.decode(model, asked, samples=2))
        assert static.word == "static"


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic,level=5"])
def test_scores_of_answers_are_those_of_the_decoder(nano, name):
    model, tokenizer = nano
    task = load_task(name)
    problems = sample(task, "test", 40, 0)
    asked = [tokenizer(task.prompt(p, chat=False))["input_ids"] for p in problems]
    decoder, scores = Decoder.of(model, tokenizer, task.max_new_tokens), []
    for how in (decoder, StaticDecoding(decoder)):
        texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in how.decode(model, asked)]
        scores.append([task.score(p, text) for p, text in zip(problems, texts, strict=True)])
    assert scores[0] == scores[1] and any(s.formatted for s in scores[0])

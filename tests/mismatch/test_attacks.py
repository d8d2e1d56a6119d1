"""Attacks on the verdict from outside: healthy pairs are never a defect, and nothing that was tampered with is ever legal."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from shaketable.capture.decoder import padded
from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.exact import compare_bits
from shaketable.mismatch.hf import HFArguments, HFEngine
from shaketable.mismatch.results import Mismatch
from shaketable.mismatch.stages import Question, run_stages
from shaketable.mismatch.trainer import Trainer
from tests.mismatch import pairs

pytestmark = pytest.mark.attack("mismatch")
DTYPES = ("float32", "bfloat16")


def how(**given: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 16, **given})


def prompts() -> list[list[int]]:
    tokenizer = pairs.trainer().tokenizer
    texts = ["12+7=", "What is 3 times 4? Answer:", "9-4=", "what is the sum of 5 and 6", "1+1=2. 2+2=4. 3+3=", "7*8="]
    return [tokenizer(text)["input_ids"] for text in texts]


@cache
def sampled(dtype: str, **given: Any) -> tuple[HFEngine, list[Rollout]]:
    other = pairs.RememberingEngine(pairs.engine(getattr(torch, dtype)).model)
    return other, other.sample(prompts(), how(**given))


def verdict(engine: HFEngine | None, rollouts: list[Rollout], declared: Sampling | None = None, recorded: int = 6) -> Mismatch:
    return run_stages(Question(pairs.trainer(), engine, rollouts, declared or how(), {}, recorded))


# ---- healthy

SAMPLINGS: dict[str, dict[str, Any]] = {
    "raw": {},
    "hot": {"temperature": 1.3, "logprobs_mode": "processed"},
    "cold": {"temperature": 0.6, "top_p": 0.9, "logprobs_mode": "processed"},
    "top_k": {"top_k": 5, "logprobs_mode": "processed"},
    "penalty": {"repetition_penalty": 1.2, "logprobs_mode": "processed"},
    "raw of a nucleus": {"temperature": 0.7, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_healthy_pair_is_legal_however_it_samples_and_its_file_is_never_a_defect(dtype, name):
    engine, rollouts = sampled(dtype, **SAMPLINGS[name])
    found = verdict(engine, rollouts, how(**SAMPLINGS[name]), recorded=2)
    assert found.verdict == "LEGAL", found.sentence
    alone = verdict(None, rollouts, how(**SAMPLINGS[name]))
    assert (alone.verdict, alone.exit_code) == ("INCONCLUSIVE", 4), alone.sentence
    assert alone.conclusion.next


def test_a_few_tokens_fit_nothing():
    """With eight tokens, a repetition penalty of 1.01 fits rounding better than rounding does."""
    texts = ["3+9=", "What is 8 minus 2? Answer:", "5*5=", "sum of 2 and 9 is", "4+4=8. 1+2=3. 9+1=", "60/3="]
    tokenizer = pairs.trainer().tokenizer
    asked = [tokenizer(text)["input_ids"] for text in [*texts, "Tom has 3 apples and", "7-2="]]
    other = HFEngine(pairs.engine(torch.bfloat16).model, HFArguments(batch=6))
    found = verdict(None, other.sample(asked, how(max_new_tokens=1, seed=1)))
    assert found.verdict == "INCONCLUSIVE", found.sentence


def test_a_token_at_the_edge_of_a_truncation_speaks_for_no_other():
    """Rounding moves a token out of the ten likeliest; top-k 15 has it, and a temperature of 1.33 fits rounding."""
    given = {"temperature": 1.3, "top_k": 10, "logprobs_mode": "processed", "max_new_tokens": 8, "seed": 988862502}
    tokenizer = pairs.trainer().tokenizer
    texts = ["What is 0 plus 56?", "86 apples, 44 pears", "25 apples, 60 pears", "69+41="]
    rollouts = pairs.engine(torch.bfloat16).sample([tokenizer(text)["input_ids"] for text in texts], how(**given))
    found = verdict(None, rollouts, how(**given))
    assert found.verdict == "INCONCLUSIVE", found.sentence


def test_a_truncation_that_cuts_nothing_off_is_not_named():
    other = pairs.engine(plant=lambda m: wrap(m.lm_head, lambda y: y * 1.02))
    found = verdict(None, other.sample(prompts(), how()))
    assert "top_k=100" not in found.sentence and not any("top_k=100" in row.name for row in found.semantics.rows)


@pytest.mark.parametrize("trainer", ["bfloat16", "float16"])
@pytest.mark.parametrize("engine", ["bfloat16", "float16"])
def test_formats_of_one_file_are_never_a_defect(trainer, engine):
    own, other = pairs.trainer(getattr(torch, trainer)), pairs.engine(getattr(torch, engine))
    rollouts = other.sample(prompts(), how())
    found = run_stages(Question(own, other, rollouts, how(), {}, 2))
    assert found.verdict == "LEGAL", found.sentence


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_differ_in_the_last_digit_of_float64_are_legal(dtype):
    model = pairs.engine(getattr(torch, dtype)).model
    ids, mask = padded(prompts())
    how_drawn = transformers.GenerationConfig(do_sample=True, max_new_tokens=16, top_k=0, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    made = model.generate(
        ids, attention_mask=mask, generation_config=how_drawn, output_logits=True, return_dict_in_generate=True
    )
    tokens = made.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(made.logits, 1).double().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    rollouts = [Rollout(*row) for row in zip(prompts(), tokens.tolist(), logprobs.tolist(), strict=True)]
    found = verdict(HFEngine(model), rollouts, recorded=2)
    assert found.verdict == "LEGAL", found.sentence


def test_numbers_that_are_read_again_in_other_batches_are_legal():
    engine, rollouts = sampled("bfloat16")
    found = verdict(HFEngine(engine.model, HFArguments(batch=4)), [*rollouts[1:], rollouts[0]], recorded=2)
    assert found.verdict == "LEGAL", found.sentence


# ---- files that were tampered with


def with_logprobs(rollouts: list[Rollout], change: Any) -> list[Rollout]:
    return [replace(r, logprobs=[min(float(x), 0.0) for x in change(np.array(r.logprobs))]) for r in rollouts]


def noisy(x: np.ndarray) -> np.ndarray:
    return x - np.abs(np.random.default_rng(len(x)).normal(0, 0.5, len(x)))


FILES = {
    "all minus one": lambda rs: with_logprobs(rs, lambda x: np.full_like(x, -1.0)),
    "base two": lambda rs: with_logprobs(rs, lambda x: x / np.log(2)),
    "noise of half a nat": lambda rs: with_logprobs(rs, noisy),
    "reversed": lambda rs: with_logprobs(rs, lambda x: x[::-1]),
    "shifted back": lambda rs: with_logprobs(rs, lambda x: np.concatenate([[-1.0], x[:-1]])),
    "rows mixed": lambda rs: [replace(r, logprobs=o.logprobs) for r, o in zip(rs, [*rs[1:], rs[0]], strict=True)],
    "a small factor": lambda rs: with_logprobs(rs, lambda x: x * 1.05),
    "a small offset": lambda rs: with_logprobs(rs, lambda x: x - 0.02),
    "one token wrong": lambda rs: [replace(rs[0], logprobs=[*rs[0].logprobs[:-1], rs[0].logprobs[-1] - 3.0]), *rs[1:]],
    "rounded to a half": lambda rs: with_logprobs(rs, lambda x: np.round(2 * x) / 2),
    "prompt not as it was read": lambda rs: [replace(r, prompt=r.prompt[:-2]) for r in rs],
    "another prompt": lambda rs: [replace(r, prompt=o.prompt) for r, o in zip(rs, [*rs[1:], rs[0]], strict=True)],
    "one rollout in six wrong": lambda rs: [*rs[:-1], *with_logprobs(rs[-1:], noisy)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_says_something_else_is_a_defect(dtype, name):
    engine, rollouts = sampled(dtype)
    found = verdict(engine, FILES[name](rollouts), recorded=1)
    # In bfloat16 a half is no more than rounding, but more than the engine from itself.
    is_small = name == "rounded to a half" and dtype == "bfloat16"
    assert found.verdict == ("INCONCLUSIVE" if is_small else "DEFECT"), found.sentence
    assert verdict(None, FILES[name](rollouts)).verdict != "LEGAL"


BELOW_ROUNDING: dict[str, Any] = {
    "2 decimals": lambda rs: with_logprobs(rs, lambda x: np.round(x, 2)),
    "float8": lambda rs: with_logprobs(rs, lambda x: torch.tensor(x).to(torch.float8_e4m3fn).double().numpy()),
    "float16": lambda rs: with_logprobs(rs, lambda x: torch.tensor(x).half().double().numpy()),
    "one token": lambda rs: [replace(rs[0], logprobs=[*rs[0].logprobs[:-1], rs[0].logprobs[-1] - 0.3]), *rs[1:]],
}


@pytest.mark.parametrize("name", BELOW_ROUNDING)
def test_a_file_changed_by_less_than_rounding_in_bfloat16_is_never_legal(name):
    engine, rollouts = sampled("bfloat16")
    found = verdict(engine, BELOW_ROUNDING[name](rollouts), recorded=1)
    assert found.verdict != "LEGAL", found.sentence
    if name != "one token":
        says = {"float8": "float8_e4m3fn"}.get(name, name)
        assert f"were rounded to {says}" in " ".join([found.sentence, *found.conclusion.not_looked_at])


def test_a_shift_in_a_file_is_named():
    _, rollouts = sampled("float32")
    assert "previous token" in verdict(None, FILES["shifted back"](rollouts)).sentence


UNDECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.7}, "divided by 0.7"),
    "top_p": ({"top_p": 0.7}, "top_p"),
    "top_k": ({"top_k": 3}, "top_k"),
    "penalty": ({"repetition_penalty": 1.5}, ""),
    "temperature and top_p": ({"temperature": 0.6, "top_p": 0.8}, "divided by 0.6"),
}


BELOW: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1.02}, ""),
    ({"repetition_penalty": 1.05}, ""),
    ({"top_k": 10}, "top_k=10"),
    ({"top_p": 0.95}, "top_p=0.95"),
]


@pytest.mark.parametrize(("given", "says"), BELOW, ids=str)
def test_undeclared_sampling_that_rounding_of_the_trainer_hides_is_never_legal(given, says):
    engine, rollouts = sampled("bfloat16", **given, logprobs_mode="processed")
    found = verdict(engine, rollouts, recorded=1)
    assert found.verdict != "LEGAL" and says in found.sentence, found.sentence


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNDECLARED)
def test_sampling_that_was_not_declared_is_a_defect(dtype, name):
    given, says = UNDECLARED[name]
    other = pairs.RememberingEngine(pairs.engine(getattr(torch, dtype)).model)
    rollouts = other.sample([*prompts(), *prompts()], how(**given, logprobs_mode="processed"))
    found = verdict(other, rollouts, recorded=1)
    assert found.verdict == "DEFECT", found.sentence
    alone = verdict(None, rollouts)
    assert alone.verdict != "LEGAL"
    if dtype == "float32":
        assert says in found.sentence and says in alone.sentence


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_logit_bias_of_the_sampler_is_a_defect(dtype):
    bias = torch.zeros(99).index_fill(0, torch.tensor([20, 21]), 4.0)
    biased = pairs.engine(getattr(torch, dtype), plant=lambda m: wrap(m.lm_head, lambda y: y + bias.to(y.dtype)))
    engine, _ = sampled(dtype)
    found = verdict(engine, biased.sample(prompts(), how()), recorded=1)
    assert found.verdict == "DEFECT", found.sentence


def test_raw_numbers_that_are_declared_to_be_of_a_nucleus_are_never_legal():
    other = pairs.engine(torch.bfloat16)
    rollouts = other.sample(prompts(), how(top_k=5))
    assert verdict(other, rollouts, how(top_k=5, logprobs_mode="processed"), recorded=1).verdict != "LEGAL"


def test_a_token_that_was_not_drawn_is_a_defect():
    given = {"top_k": 5, "logprobs_mode": "processed"}
    other, rollouts = sampled("bfloat16", **given)
    changed = [replace(rollouts[0], completion=[*rollouts[0].completion[:-1], 90]), *rollouts[1:]]
    assert verdict(other, changed, how(**given), recorded=1).verdict == "DEFECT"


# ---- engines with a fault


def wrap(module: nn.Module, change: Any) -> None:
    module.register_forward_hook(lambda m, a, y: change(y))


def later_rows(y: torch.Tensor, factor: float = 1.3, rows: slice = slice(1, None)) -> torch.Tensor:
    y = y.clone()
    y[rows] *= factor
    return y


def unmasked(model: Any) -> None:
    """Padding on the left is read as if it were text."""
    model.register_forward_pre_hook(
        lambda m, a, k: (a, {n: v for n, v in k.items() if n not in ("attention_mask", "position_ids")}), with_kwargs=True
    )


def decode_only(model: Any) -> None:
    wrap(model.model.layers[2].mlp.down_proj, lambda y: y * 1.2 if y.shape[1] == 1 else y)


def skipped(model: Any) -> None:
    model.model.layers[3].forward = lambda hidden_states, *a, **k: hidden_states


def between(model: Any) -> None:
    model.model.layers[4].register_forward_pre_hook(lambda m, a: (a[0] * 1.003, *a[1:]))


def behind_the_head(model: Any) -> None:
    def cap(m: Any, a: Any, out: Any) -> Any:
        out.logits = 30 * torch.tanh(out.logits / 30)
        return out

    model.register_forward_hook(cap)


FAULTS = {
    "lm_head in batches": lambda m: wrap(m.lm_head, lambda y: y * 1.1 if y.shape[0] > 1 else y),
    "padding without a mask": unmasked,
    "decode only": decode_only,
    "decode of rows above the first": lambda m: wrap(m.model.layers[1].mlp.up_proj, lambda y: later_rows(y) if y.shape[1] == 1 else y),
    "a layer is skipped": skipped,
    "between layers, where no operator is": between,
    "a little behind the MLP": lambda m: wrap(m.model.layers[4].mlp, lambda y: y * 1.003),
    "one row of six": lambda m: wrap(m.model.layers[1].self_attn.o_proj, lambda y: later_rows(y, 1.2, slice(4, 5))),
    "a mild soft cap behind the head": behind_the_head,
    "a value in a hundred": lambda m: wrap(m.model.layers[5].mlp.down_proj, lambda y: y + (torch.arange(y.shape[-1]) % 100 == 0) * y.std() * 3),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_engine_is_never_legal(dtype, name):
    other = pairs.engine(getattr(torch, dtype), plant=FAULTS[name])
    rollouts = other.sample(prompts(), how())
    found = verdict(other, rollouts, recorded=2 if dtype == "float32" else 1)
    assert found.verdict != "LEGAL", found.sentence


def test_a_fault_that_passes_is_never_legal():
    """One operator is wrong while one rollout is drawn, by less than rounding moves log-probabilities."""
    calls = iter(range(10**6))
    other = pairs.engine(torch.bfloat16)
    wrap(other.model.model.layers[2].mlp.down_proj, lambda y: y * 1.2 if 16 <= next(calls) < 32 else y)
    engine = HFEngine(other.model, HFArguments(batch=1))
    found = verdict(engine, engine.sample(prompts(), how()), recorded=1)
    assert found.verdict != "LEGAL" and "repeats most others exactly" in found.sentence, found.sentence


def test_an_engine_that_depends_on_its_batch_is_a_defect():
    other = pairs.engine(plant=unmasked)
    found = verdict(other, other.sample(prompts(), how()))
    assert found.verdict == "DEFECT"


def test_a_missing_layer_is_named():
    def cut(model: Any) -> None:
        del model.model.layers[3]
        model.config.num_hidden_layers -= 1
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = i

    other = pairs.engine(plant=cut)
    found = verdict(other, other.sample(prompts(), how()))
    assert found.verdict == "DEFECT" and "holds the values of model.layers.4." in found.sentence, found.sentence
    other = pairs.engine(plant=skipped)
    found = verdict(other, other.sample(prompts(), how()))
    assert "layer 3 is missing" in found.sentence, found.sentence


# ---- models of other shapes


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A small model with random weights that give tokens different probabilities."""
    shape = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    qwen_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    multipliers = {"residual_multiplier": 0.3, "embedding_multiplier": 2.0}
    more: dict[str, dict[str, Any]] = {
        "mixtral": experts,
        "qwen3_moe": qwen_experts | {"head_dim": 16, "norm_topk_prob": True},
        "qwen2": {},
        "mistral": {"sliding_window": 8},
        "granite": multipliers | {"logits_scaling": 2.0, "attention_multiplier": 0.2},
        "gemma": {"head_dim": 16},
        "gemma2": {"head_dim": 16},
        "qwen2_moe": qwen_experts,
        "gpt_oss": experts | {"head_dim": 16},
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **shape, **more[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 3 / parameter.shape[-1] ** 0.5 if parameter.shape[0] != 99 else 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def pair_verdict(kind: str, plant: Any = None, dtype: torch.dtype = torch.float32, exact: bool = False) -> Mismatch:
    model = build(kind, dtype=dtype)
    if plant is not None:
        plant(model)
    engine = HFEngine(model, HFArguments(batch=4))
    some = [[5 + (i * 7 + j * 3) % 80 for j in range(4 + i)] for i in range(6)]
    rollouts = engine.sample(some, how(max_new_tokens=10))
    trainer = Trainer(build(kind), None, kind)
    found = run_stages(Question(trainer, engine, rollouts, how(max_new_tokens=10), {}, 2))
    found.exact = compare_bits(trainer, engine, rollouts, 2) if exact else None
    return found


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2", "mistral", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_healthy_models_of_other_shapes_are_legal(kind, dtype):
    found = pair_verdict(kind, dtype=getattr(torch, dtype))
    has_experts = kind in ("mixtral", "qwen3_moe")
    may_be_open = has_experts and dtype == "bfloat16"
    assert found.verdict == "LEGAL" or (may_be_open and found.verdict == "INCONCLUSIVE"), found.sentence
    if has_experts:
        assert found.operators.kinds["experts"].operators == 6


SCALES = {
    "embedding": lambda m: setattr(m.model, "embedding_multiplier", 2.02),
    "logits": lambda m: setattr(m.config, "logits_scaling", 2.05),
    "residual": lambda m: setattr(m.model.layers[1], "residual_multiplier", 0.31),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_wrong_multiplier_of_granite_is_never_legal(name):
    assert pair_verdict("granite", SCALES[name]).verdict != "LEGAL"


@pytest.mark.parametrize("kind", ["gemma2", "qwen2_moe", "gpt_oss", "granite"])
def test_models_whose_operators_are_not_known_are_judged_as_far_as_can_be(kind):
    found = pair_verdict(kind, dtype=torch.bfloat16, exact=True)
    assert found.verdict in ("LEGAL", "INCONCLUSIVE"), found.sentence
    assert found.weights.compared and found.returned.explained and (found.exact.operators or found.exact.unavailable)


def top_one(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1


def not_renormalised(model: Any) -> None:
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.register_forward_hook(lambda m, a, y: (y[0], y[0].softmax(-1).gather(1, y[2]).to(y[1].dtype), y[2]))


def next_expert(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda m, a, y: (y[0], y[1], (y[2] + 1) % 4))


EXPERTS = {
    "zero": lambda m: wrap(m.model.layers[1].mlp.experts, lambda y: y * 0),
    "half as much again": lambda m: wrap(m.model.layers[1].mlp.experts, lambda y: y * 1.5),
    "one in a hundred more": lambda m: wrap(m.model.layers[1].mlp.experts, lambda y: y * 1.01),
    "one expert in place of two": top_one,
    "weights not renormalised": not_renormalised,
    "the next expert": next_expert,
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", EXPERTS)
def test_wrong_experts_are_a_defect(kind, name):
    found = pair_verdict(kind, EXPERTS[name])
    assert found.verdict == "DEFECT", found.sentence
    if kind == "mixtral" and name != "one in a hundred more":
        assert pair_verdict(kind, EXPERTS[name], torch.bfloat16).verdict != "LEGAL"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_off_by_less_than_an_interval_are_a_defect_in_bfloat16(kind):
    found = pair_verdict(kind, lambda m: wrap(m.model.layers[1].mlp, lambda y: y * 1.02), torch.bfloat16)
    assert found.verdict == "DEFECT" and "layers.1.mlp (experts" in found.sentence, found.sentence


def test_numbers_that_are_not_finite_stay_out_of_the_json():
    def no_token_95(y: torch.Tensor) -> torch.Tensor:
        return y.index_fill(-1, torch.tensor([95]), -torch.inf)

    other = pairs.engine(plant=lambda m: wrap(m.lm_head, no_token_95))
    found = verdict(other, other.sample(prompts(), how()), recorded=1)
    assert found.verdict == "DEFECT", found.sentence
    json.dumps(found.to_dict(), allow_nan=False)
    broken = pairs.engine(plant=lambda m: wrap(m.lm_head, lambda y: y * torch.nan))
    found = verdict(broken, pairs.engine().sample(prompts(), how()), recorded=1)
    assert found.verdict == "DEFECT" and "not numbers (NaN)" in found.sentence, found.sentence
    json.dumps(found.to_dict(), allow_nan=False)


def one_expert(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda m, a: (a[0], a[1], torch.where(a[1] == 2, a[2] * 1.2, a[2])))


def test_a_fault_of_one_expert_is_found_in_its_result_and_named_in_its_weights():
    found = pair_verdict("mixtral", one_expert)
    assert found.verdict == "DEFECT" and "layers.1.mlp (experts" in found.sentence, found.sentence

    def plant(model: Any) -> None:
        with torch.no_grad():
            weight = model.model.layers[1].mlp.experts.down_proj
            weight[2] += 0.01 * weight[2].std() * torch.randn_like(weight[2])

    found = pair_verdict("mixtral", plant)
    assert "layers.1.mlp.experts.down_proj holds close values" in found.sentence, found.sentence
    assert "1 of 4 experts differ (2)" in found.sentence, found.sentence

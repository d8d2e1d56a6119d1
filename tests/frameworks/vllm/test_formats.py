"""Low-precision formats on the linears of vLLM: weights, activations, both; and a sync of all weights in between."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import shaketable as st
from tests.frameworks.vllm.small_engines import NANO, PROMPTS, apart, same, share_within, start

pytestmark = pytest.mark.covers("vLLM", "formats on weights and inputs; agree with transformers", "eager, in process")

WEIGHTS = "mxfp4@module.linear,point=weight"


@pytest.fixture(scope="module")
def formats():
    """An engine whose instructions are about the weights of linears, which it therefore does not pack away; with AQN."""
    engine = start("nano", plan=WEIGHTS, aqn="constant:0.05")
    engine.set_sigma(0.0)
    return engine


@pytest.fixture(scope="module")
def ids(formats):
    return [formats.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def test_instructions_hold_from_the_first_request_on_also_when_one_of_them_was_changed_before_it(formats, oracle, ids):
    assert agrees(formats.ask(), oracle, ids, WEIGHTS)
    assert formats.site()["matched"] == 32 and formats.site()["forward"] == 32


@pytest.mark.parametrize("plan", ["mxfp4@module.linear,point=weight+input", "mxfp4@module.o_proj+down_proj,point=weight"])
def test_a_format_is_the_same_format_as_in_transformers(formats, oracle, ids, plan):
    formats.clear()
    clean = formats.ask()
    formats.set_plan(plan)
    shaken = formats.ask()
    assert apart(shaken[1], clean[1]) > 1e-2
    assert agrees(shaken, oracle, ids, plan)


def test_clear_gives_every_bit_back(formats, oracle, ids):
    formats.clear()
    weights, clean = formats.weights(), formats.ask()
    formats.set_plan("mxfp4@module.linear,point=weight+input")
    formats.set_aqn("constant:0.1,roles=linear+rmsnorm", 1)
    noisy = formats.weights()
    assert sum(not torch.equal(noisy[name], weights[name]) for name in weights) == 32 + 17
    formats.ask()
    formats.clear()
    assert same(formats.weights(), weights) and same(formats.ask()[1], clean[1])
    assert agrees(clean, oracle, ids, None)


def test_all_weights_are_replaced_while_a_format_and_noise_are_on(formats, oracle, ids):
    old = load_file(NANO / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {name: value + 0.02 * torch.randn(value.shape, generator=generator) for name, value in old.items()}
    formats.clear()
    before = formats.weights()
    oracle.model.load_state_dict(new, strict=False)
    try:
        formats.set_plan(WEIGHTS)
        formats.set_aqn("constant:0.1", 10)
        formats.model.load_weights(new.items())
        formats.set_sigma(0.0)
        assert agrees(formats.ask(), oracle, ids, WEIGHTS)
        formats.clear()
        assert agrees(formats.ask(), oracle, ids, None)
        assert torch.equal(formats.model.get_parameter("model.norm.weight"), new["model.norm.weight"])
    finally:
        oracle.model.load_state_dict(old, strict=False)
        formats.clear()
        formats.model.load_weights(old.items())
    assert same(formats.weights(), before)


def agrees(answer, oracle, ids, plan):
    """Whether vLLM says what transformers says under a plan."""
    if plan is None:
        tokens, logprobs = oracle.ask(ids)
    else:
        with st.inject(oracle.model, plan):
            tokens, logprobs = oracle.ask(ids)
    least = 0.75 if plan is not None and "input" in plan else 1
    return answer[0] == tokens and share_within(1e-4, answer[1], logprobs) >= least

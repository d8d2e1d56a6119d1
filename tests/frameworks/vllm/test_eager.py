"""Plans in an eager vLLM: the same faults as in transformers, switched and changed while the engine lives."""

from __future__ import annotations

import pytest
import torch

import shaketable as st
from shaketable.errors import NoMatchError, PlanError, ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import merged, read_reports
from tests.frameworks.vllm.small_engines import PROMPTS, START, apart, same, share_within

pytestmark = pytest.mark.covers("vLLM", "module, layer and operator plans, live; agree with transformers", "eager, in process")

STEADY = [
    "dead_zone:0.05,scope=token@layer.3",
    "gain:0.1@layer.2",
    "gain:0.1@layer.2,point=input",
    "dead_zone:0.02,scope=token@layer.1; saturation:0.6,scope=token@layer.1",
    "gain:0.1,sparsity=0.5@module.rmsnorm",
    "saturation:0.6,scope=token@module.rmsnorm,point=input; gain:0.1,sparsity=0.5@module.rmsnorm,point=input",
    "gain:0.1@module.post_attention_layernorm,layers=2-5",
    "gain:0.1@module.attention,point=input",
    "dead_zone:0.05,scope=token@module.down_proj,point=input",
    "mxfp4@module.linear,point=input",
    "gain:0.2@module.rmsnorm,point=weight",
    "gain:0.1@op.matmul",
    "gain:0.1@op.sdpa",
]
"""Faults without chance, at every kind of site; none of them looks across the tokens of a batch, few have steps at which the
last bit of a number decides."""


@pytest.fixture(scope="module")
def clean(engine):
    engine.clear()
    return engine.ask()


@pytest.fixture(scope="module")
def ids(engine):
    return [engine.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def test_without_a_plan_both_libraries_compute_the_same(clean, oracle, ids):
    tokens, logprobs = oracle.ask(ids)
    assert clean[0] == tokens
    assert apart(clean[1], logprobs) < 5e-5


@pytest.mark.parametrize("plan", STEADY)
def test_a_fault_is_the_same_fault_as_in_transformers(llm, clean, oracle, ids, plan):
    with st.inject(oracle.model, plan):
        tokens, logprobs = oracle.ask(ids)
    llm.set_plan(plan)
    shaken = llm.ask()
    assert apart(logprobs, clean[1]) > 5e-4, "this plan is too weak to show anything"
    assert shaken[0] == tokens
    assert share_within(1e-4, shaken[1], logprobs) >= (0.75 if plan.startswith("mxfp4") else 1)


def test_after_clear_every_number_is_as_before(engine, clean):
    engine.clear()
    weights = engine.weights()
    for plan in ("relative_gaussian:0.2@module.linear", "relative_gaussian:0.3@module.rmsnorm,point=weight"):
        engine.set_plan(plan)
        shaken = engine.ask()
        engine.clear()
        assert apart(shaken[1], clean[1]) > 1e-3
        again = engine.ask()
        assert again[0] == clean[0] and same(again[1], clean[1])
    assert same(engine.weights(), weights)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.model.modules())


def test_noise_is_keyed_by_seed_and_step_and_new_at_every_forward(llm):
    def shaken(seed, step):
        llm.clear()
        llm.set_plan("relative_gaussian:0.05@module.linear", seed)
        llm.set_step(step)
        return llm.ask()[1]

    first, again, other_seed, other_step = shaken(1, 0), shaken(1, 0), shaken(2, 0), shaken(1, 5)
    assert same(first, again)
    assert not same(first, llm.ask()[1])
    assert not same(first, other_seed) and not same(first, other_step)


def test_a_validation_is_clean_where_the_plan_names_rollouts(llm, clean):
    llm.set_plan("gain:0.3@layer.2,phase=rollout")
    llm.set_phase("eval")
    quiet = llm.ask()
    assert quiet[0] == clean[0] and same(quiet[1], clean[1])
    llm.set_phase("rollout")
    assert apart(llm.ask()[1], clean[1]) > 1e-3
    assert llm.site()["phases"].keys() == {"rollout"}


def test_a_prefix_computed_by_another_model_is_not_used(llm):
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [3, 7, 11, 5] * 10}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)

    def ask():
        (output,) = llm.llm.generate([prompt], params, use_tqdm=False)
        return output.num_cached_tokens, torch.tensor([next(iter(e.values())).logprob for e in output.outputs[0].logprobs])

    clean = ask()[1]
    assert ask()[0] >= 32, "prefix caching is off, and this test shows nothing"
    results = []
    for change in (lambda: llm.set_plan("gain:0.2@layer.1"), lambda: llm.set_magnitude(0.4), lambda: llm.set_sigma(0.3)):
        change()
        cached, results = 0, [*results, ask()]
        assert results[-1][0] == cached
    for i, (_, a) in enumerate(results):
        assert all(not torch.equal(a, b) for _, b in results[:i]) and not torch.equal(a, clean)
    llm.clear()
    cached, logprobs = ask()
    assert cached == 0 and torch.equal(logprobs, clean)


def test_no_change_while_a_request_is_running(llm):
    from vllm import SamplingParams

    core = llm.llm.llm_engine
    core.add_request("one", {"prompt_token_ids": [3, 7, 11, 5]}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    core.step()
    for call in (lambda: llm.set_sigma(0.1), lambda: llm.set_plan(START), lambda: llm.clear()):
        with pytest.raises(ShaketableError, match="while requests are running"):
            call()
    assert llm.ledger()
    while core.has_unfinished_requests():
        core.step()
    llm.set_sigma(0.1)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("gain:0.1@module.q_proj", "inside of qkv_proj"),
        ("gain:0.1@layer.8", "this model has layers 0-7"),
        ("gain:0.1@module.linear,include=lm_head", "never calls 'lm_head'"),
        ("mxfp4@module.lm_head,point=weight", "have one weight"),
        ("mxfp4@module.linear,point=weight", "was packed"),
    ],
)
def test_a_plan_that_cannot_act_is_refused_and_the_one_before_stays(llm, plan, why):
    llm.set_plan("gain:0.1@layer.2")
    before = llm.ask()
    with pytest.raises((PlanError, NoMatchError), match=why):
        llm.set_plan(plan)
    after = llm.ask()
    assert after[0] == before[0] and same(after[1], before[1])
    assert llm.site()["site"] == "layer.2"


def test_the_worker_reports_its_instructions_and_its_ledger_outlives_the_plan(llm):
    llm.set_plan("gain:0.1@layer.2")
    llm.ask()
    llm.worker._shaketable.file.flush()
    llm.clear()
    llm.worker._shaketable.file.flush()
    (report,) = read_reports(llm.worker._shaketable.file.path.parent)
    assert report["role"] == "sampler"
    assert report["instructions"] == Instructions(plan=START).digest()
    assert merged([report]).forward == llm.site()["forward"] > 0

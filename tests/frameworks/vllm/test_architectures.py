"""Models of other families in vLLM: biases, LayerNorms, a mixture of experts, Gemma's norms; each against transformers."""

from __future__ import annotations

import pytest
import torch

import shaketable as st
from shaketable.errors import PlanError
from tests.frameworks.vllm.small_engines import Oracle, apart, same, share_within, start
from tests.frameworks.vllm.small_models import save

pytestmark = pytest.mark.covers("vLLM", "mixture of experts and other architectures", "eager, in process")

IDS = [[3, 7, 11, 5, 9], [20, 4, 8], [31, 30, 29, 28, 27, 26, 25]]
PLANS = {
    "qwen3_moe": [
        "saturation:0.5,scope=token@module.rmsnorm,point=input",
        "gain:0.2@module.linear",
        "gain:0.2@module.experts",
    ],
    "gpt2": [
        "gain:0.2,sparsity=0.5@module.layernorm",
        "gain:0.2@module.c_attn",
        "gain:0.2@module.layernorm,point=weight",
    ],
    "gemma2": ["gain:0.2@layer.1", "gain:0.2,sparsity=0.5@module.rmsnorm", "gain:0.2@module.rmsnorm,point=weight"],
}
AQN = {"gpt2": "constant:0.1,roles=layernorm"}


@pytest.fixture(scope="module", params=sorted(PLANS))
def family(request, tmp_path_factory):
    """A family's name, its model in vLLM, and in transformers."""
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, start(folder), Oracle(folder)


mixture = pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True, scope="module")


def test_plans_are_the_same_faults_as_in_transformers(family):
    name, engine, oracle = family
    clean = oracle.ask(IDS)[1]
    assert apart(engine.ask(IDS)[1], clean) < 5e-4
    for plan in PLANS[name]:
        with st.inject(oracle.model, plan):
            tokens, logprobs = oracle.ask(IDS)
        engine.set_plan(plan)
        shaken = engine.ask(IDS)
        assert apart(logprobs, clean) > 1e-2, f"{plan} is too weak to show anything"
        assert share_within(1e-3, shaken[1], logprobs) == 1, plan
        assert shaken[0] == tokens, plan
        assert min(engine.spots().values()) > 0, plan
    engine.clear()
    assert apart(engine.ask(IDS)[1], clean) < 5e-4


def test_aqn_has_the_noise_of_a_rollout_in_transformers(family):
    name, engine, oracle = family
    aqn = AQN.get(name, "constant:0.1")
    engine.clear()
    clean = engine.weights()
    engine.set_aqn(aqn, 1)
    noisy = engine.weights()
    hit = {key for key in clean if not torch.equal(clean[key], noisy[key])}
    written = st.AQN.load(aqn).attach(oracle.model, 1, sampler=True, rank=0).enable()
    expected = {key: oracle.model.get_parameter(key).detach().clone() for key in hit}
    written.close(check=False)
    assert hit == {f"{spot.removesuffix(':weight')}.weight" for spot in written.modules_hit}
    assert same({key: noisy[key] for key in hit}, expected)
    engine.clear()
    assert same(engine.weights(), clean)


@mixture
def test_of_a_mixture_aqn_leaves_the_norm_before_the_router_alone_and_plans_leave_the_router(family):
    _, engine, _ = family
    engine.clear()
    engine.set_aqn("constant:0.1", 1)
    assert set(engine.spots("aqn")) == {f"model.layers.{i}.post_attention_layernorm:weight" for i in range(3)}
    engine.set_plan("gain:0.2@module.linear")
    engine.ask(IDS)
    spots = engine.spots()
    assert {f"model.layers.{i}.mlp.experts" for i in range(3)} <= spots.keys()
    assert not any("gate" in spot for spot in spots)


@mixture
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("mxfp4@module.experts,point=weight", "an order of its own"),
        ("mxfp4@module.linear,point=weight", "was packed|an order of its own"),
        ("mxfp4@module.linear,point=input", "the router reads the same input"),
    ],
)
def test_faults_that_would_reach_more_than_the_experts_or_other_than_their_weights_are_refused(family, plan, why):
    _, engine, _ = family
    engine.clear()
    with pytest.raises(PlanError, match=why):
        engine.set_plan(plan)

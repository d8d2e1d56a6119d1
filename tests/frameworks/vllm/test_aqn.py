"""AQN in an eager vLLM: the sampler's norms, and nobody else's; live, exact, and gone when it should be gone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import shaketable as st
from shaketable.errors import NoMatchError, ShaketableError
from tests.frameworks.vllm.small_engines import NANO, apart, same

pytestmark = pytest.mark.covers("vLLM", "AQN: σ, steps, phases, weight sync; bits of transformers", "eager, in process")


@pytest.fixture(scope="module")
def clean(engine):
    """Weights and answers of the clean model."""
    engine.clear()
    return engine.norms(), *engine.ask()


def as_read(model, aqn, total_steps, step):
    """The norm weights that a transformers model reads in its first rollout of a step."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda m, _, __, name=name: seen.update({f"{name}.weight": m.weight.clone()}))
        for name, module in model.named_modules()
        if "norm" in name
    ]
    with st.AQN.load(aqn).attach(model, total_steps, step=step), st.phase("rollout"), torch.no_grad():
        model(torch.tensor([[3, 7, 11]]))
    for hook in hooks:
        hook.remove()
    return seen


def spread(noisy, clean, name):
    """σ of the noise on a weight, in units of the weight's RMS."""
    return float((noisy[name] - clean[name]).square().mean().sqrt() / clean[name].square().mean().sqrt())


def test_the_norms_have_bit_for_bit_the_noise_of_a_rollout_in_transformers(llm, oracle):
    aqn = "global_decay:0.08-0.002,stages=5,seed=3,multipliers=0:3+5:0+7:0.5"
    for step in (7, 3):
        llm.set_aqn(aqn, 10, step)
        expected = as_read(oracle.model, aqn, 10, step)
        assert len(expected) == 17
        assert same(llm.norms(), expected)


def test_sigma_is_changed_live_and_measured(llm, clean):
    llm.set_aqn("constant:0.02", 1)
    for sigma in (0.02, 0.1, 0.3):
        llm.set_sigma(sigma)
        llm.ask()
        norms = llm.norms()
        assert torch.tensor([spread(norms, clean[0], name) for name in norms]).mean() == pytest.approx(sigma, rel=0.1)
        assert llm.report()["sigma"] == sigma
    site = llm.site("aqn")
    assert site["matched"] == 17 and site["remark"] is None
    assert site["measured_magnitude"] == pytest.approx((0.02 + 0.1 + 0.3) / 3, rel=0.1)


def test_a_validation_is_clean_and_so_is_everything_after_clear(llm, clean):
    llm.set_aqn("constant:0.2", 1)
    noisy = llm.norms()
    assert (llm.report()["sigma"], llm.report()["written"]) == (0.2, 17)
    llm.set_phase("eval")
    assert same(llm.norms(), clean[0]) and same(llm.ask()[1], clean[2])
    assert (llm.report()["sigma"], llm.report()["sigmas"], llm.report()["written"]) == (0.0, {}, 0)
    llm.set_phase("rollout")
    assert same(llm.norms(), noisy)
    assert apart(llm.ask()[1], clean[2]) > 1e-2
    llm.clear()
    assert same(llm.norms(), clean[0])
    tokens, logprobs = llm.ask()
    assert tokens == clean[1] and same(logprobs, clean[2])


def test_weights_that_arrive_are_the_clean_ones_and_have_noise_at_the_next_request(llm, clean):
    """What a weight sync does, in a run with AQN on, with all norms and then with one."""
    old = {name: value for name, value in load_file(NANO / "model.safetensors").items() if "norm" in name}
    new = {name: value * 1.25 for name, value in old.items()}
    try:
        llm.set_aqn("constant:0.05", 10)
        llm.set_step(1)
        llm.model.load_weights(new.items())
        assert same(llm.norms(), new)
        llm.ask()
        noisy = llm.norms()
        for name, value in new.items():
            assert 0.03 < spread(noisy, new, name) < 0.07 and not torch.equal(noisy[name], value)
        llm.set_step(2)
        one = "model.norm.weight"
        llm.model.load_weights([(one, old[one])])
        llm.ask()
        noisy = llm.norms()
        assert 0.03 < spread(noisy, old, one) < 0.07
        assert 0.03 < spread(noisy, new, "model.layers.3.input_layernorm.weight") < 0.07
        llm.clear()
        assert same(llm.norms(), new | {one: old[one]})
    finally:
        llm.clear()
        llm.model.load_weights(old.items())
    assert same(llm.norms(), clean[0])


def test_a_plan_and_aqn_on_the_same_weights_come_off_one_by_one(llm, clean):
    llm.set_plan("gain:0.5@module.rmsnorm,point=weight")
    llm.set_aqn("constant:0.1", 10)
    together = llm.norms()
    llm.set_magnitude(0.25)
    llm.set_step(3)
    llm.set_step(0)
    llm.set_magnitude(0.5)
    assert same(llm.norms(), together)
    llm.set_sigma(0.0)
    for name, value in llm.norms().items():
        assert torch.allclose(value, clean[0][name] * 1.5)
    llm.clear()
    assert same(llm.norms(), clean[0])


def test_aqn_that_cannot_be_is_refused_and_the_one_before_stays(llm):
    llm.set_aqn("constant:0.05", 10, 2)
    norms = llm.norms()
    with pytest.raises(NoMatchError, match="layers 0-7"):
        llm.set_aqn("constant:0.05,layers=9", 10, 4)
    with pytest.raises(ShaketableError, match="0 or above"):
        llm.set_sigma(-0.1)
    assert llm.report()["step"] == 2 and same(llm.norms(), norms)
    llm.clear()
    with pytest.raises(ShaketableError, match="no AQN"):
        llm.set_sigma(None)


def test_weights_that_vllm_reads_again_itself_have_noise_and_come_back_clean(llm, clean):
    llm.set_sigma(0.05)
    llm.ask()
    noisy = llm.norms()
    llm.llm.collective_rpc("reload_weights")
    llm.ask()
    assert same(llm.norms(), noisy)
    llm.clear()
    assert same(llm.norms(), clean[0])


def test_noise_on_outputs_comes_before_or_after_a_fault_whichever_was_set_first(llm):
    """Survival tells: noise behind a dead zone leaves the share that survives as it is, noise in front of it does not."""
    zone, noise = "dead_zone:0.6,scope=token@layer.3", "constant:0.5,form=output,layers=3"

    def survival():
        llm.ask(tokens=1)
        return llm.site("plan")["survival_rate"]

    llm.set_plan(zone)
    alone = survival()
    llm.set_aqn(f"{noise},order=before", 1)
    llm.set_plan(zone)
    assert survival() != pytest.approx(alone, rel=1e-3), "another plan, and the noise is still in front of it"
    llm.clear()
    llm.set_aqn(f"{noise},order=after", 1)
    llm.set_plan(zone)
    assert survival() == pytest.approx(alone, rel=1e-3)
    assert llm.site("aqn")["forward"] > 0
    llm.clear()
    with pytest.raises(ShaketableError, match="order=before needs a plan, and there is none"):
        llm.set_aqn(f"{noise},order=before", 1)

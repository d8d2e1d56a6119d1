"""AQN on models: which weights, when, how much, and never anywhere else. Names with a number are failures of the origin."""

import copy
import random
import re

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaketable as st
from shaketable.errors import ShaketableError
from tests import ROOT

ON = st.Constant(0.05)
IDS = torch.arange(1, 9)[None]


def sample(model, **more):
    """Logits of a greedy rollout of four tokens."""
    kept = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0, "do_sample": False}
    return torch.stack(model.generate(IDS, max_new_tokens=4, **kept, **more).logits)


def watch(model, name):
    """The weight that a module really reads, at each of its calls; to be called once the noise is attached and on."""
    seen = []
    model.get_submodule(name).register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    return seen


def layers_hit(noise):
    """The decoder layers in which the noise has a place, by the ledger."""
    layers = {spot.layer for site in noise.ledger.sites for spot in site.spots.values()}
    return tuple(sorted(layers - {None}))


def llama(**shape):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**(small | shape))).eval()


class VllmRMSNorm(nn.Module):
    """No relation to any class of Hugging Face."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, residual):
        y = x + residual
        return F.rms_norm(y, y.shape[-1:], self.weight), y


class VllmModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"input_layernorm": VllmRMSNorm(8), "up": nn.Linear(8, 8)}) for _ in range(3))
        self.norm = VllmRMSNorm(8)

    def forward(self, x):
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer["input_layernorm"](x, residual)
            x = layer["up"](x)
        return self.norm(x, residual)[0]


# ---- which weights


def test_origin_01_norms_of_another_library_are_hit():
    model = VllmModel()
    with torch.no_grad(), st.AQN(ON).attach(model, 10) as noise:
        clean = model(torch.ones(1, 8))
        with st.phase("rollout"):
            assert not torch.equal(model(torch.ones(1, 8)), clean)
    assert len(noise.modules_hit) == noise.ledger.forward == 4
    assert layers_hit(noise) == (0, 1, 2)


@pytest.mark.parametrize("more", [{}, {"multipliers": {1: 2.0}}, {"layers": [0, 1]}, {"roles": ("rmsnorm", "linear")}])
def test_origin_23_a_mixture_of_experts_has_noise_on_one_norm_and_none_on_routers(more):
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4)).eval()
    with st.AQN(ON, **more).attach(model, 10) as noise:
        sample(model)
    names = [name for name in noise.modules_hit if "norm" in name]
    assert names and all(name.endswith("post_attention_layernorm:weight") for name in names)
    assert not any(re.search(r"mlp\.gate\b|router|lm_head", name) for name in noise.modules_hit)
    assert ("linear" in more.get("roles", ())) == any("proj" in name for name in noise.modules_hit)


def test_origin_22_merged_and_unmerged_adapters_have_the_same_noise(tiny_llama):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama, LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)).eval()
    clean = sample(model)
    with st.AQN(ON, roles=("rmsnorm",)).attach(model, 10):
        unmerged = sample(model)
    merged = model.merge_and_unload()
    with st.AQN(ON, roles=("rmsnorm",)).attach(merged, 10):
        again = sample(merged)
    assert torch.allclose(unmerged, again, atol=1e-5)
    assert not torch.allclose(unmerged, clean, atol=1e-3)


def test_origin_24_what_hits_nothing_raises_at_once(tiny_llama):
    cases = [
        (st.AQN(ON, roles=("layernorm",)), "nothing in LlamaForCausalLM matches 'layernorm'"),
        (st.AQN(ON, roles=("rmsnorm", "layernorm")), "matches 'layernorm'"),
        (st.AQN(ON, layers=[7]), "layer 7 is out of range; this model has layers 0-3"),
        (st.AQN(ON, form="output", layers=[7]), "out of range"),
        (st.AQN(ON, multipliers={9: 2.0}), "layer 9 is out of range"),
        (st.AQN(ON, multipliers=dict.fromkeys(range(4), 0.0), form="output"), "multiplier 0"),
        (st.AQN(ON, zones=True, layers=[0, 3]), "none of these layers .* is a middle one"),
    ]
    for aqn, message in cases:
        with pytest.raises(st.NoMatchError, match=message):
            aqn.attach(tiny_llama, 10)
    with pytest.raises(st.NoMatchError, match="no decoder layers"):
        st.AQN(ON, form="output").attach(nn.Linear(2, 2), 10)
    with pytest.raises(st.PlanError, match=r"torch\.nn\.Module"):
        st.AQN(ON).attach("model", 10)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_llama.modules())


def test_zones_halve_the_middle_after_half_of_the_run(tiny_llama):
    noise = st.AQN(ON, zones=True).attach(tiny_llama, 10)
    seen = []
    for step in (0, 4, 5, 9):
        noise.step = step
        seen.append(noise.sigmas)
    before, after = dict.fromkeys(range(4), 0.05), {0: 0.05, 1: 0.025, 2: 0.025, 3: 0.05}
    assert seen == [before, before, after, after]
    assert len(noise.modules_hit) == 9


# ---- how much


@pytest.mark.parametrize(("unit", "asked"), [("relative", 0.05 * 0.3), ("absolute", 0.05)])
def test_the_unit_is_the_weights_own_size_or_one(unit, asked):
    model = llama(hidden_size=1024)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.constant_(module.weight, 0.3)
    with st.AQN(ON, unit=unit).attach(model, 10) as noise:
        seen = watch(model, "model.norm")
        sample(model)
    assert float((seen[0] - 0.3).std()) == pytest.approx(asked, rel=0.1)
    assert noise.ledger.sites[0].magnitude == pytest.approx(0.05, rel=0.1)


def test_origin_02_the_epoch_aware_noise_is_there(tiny_llama):
    aqn = st.AQN(st.EpochAware([(0.05, 0.01), (0.01, 0.0005)]))
    with aqn.attach(tiny_llama, 4) as noise:
        seen = watch(tiny_llama, "model.norm")
        for step, expected in enumerate((0.05, 0.05 * 0.2**0.5, 0.01, 0.01 * 0.05**0.5)):
            noise.step = step
            assert noise.sigma == pytest.approx(expected)
            seen.clear()
            sample(tiny_llama)
            assert float((seen[0] - 1).std()) == pytest.approx(expected, rel=0.6)


# ---- when, and never anywhere else


def train_step(model):
    model.zero_grad()
    loss = model.train()(IDS, labels=IDS).loss
    loss.backward()
    model.eval()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_training_is_clean_and_sampling_is_not(tiny_llama):
    clean, grads, logits = sample(tiny_llama), train_step(tiny_llama), tiny_llama(IDS).logits
    with st.AQN(ON).attach(tiny_llama, 10):
        assert not torch.equal(sample(tiny_llama), clean)
        assert all(torch.equal(a, b) for a, b in zip(train_step(tiny_llama), grads, strict=True))
        assert torch.equal(tiny_llama(IDS).logits, logits)


def test_where_both_trains_on_the_policy_that_sampled(tiny_llama):
    grads, logits = train_step(tiny_llama), tiny_llama(IDS).logits
    with st.AQN(ON, where="both").attach(tiny_llama, 10) as noise:
        sampled = sample(tiny_llama)[0]
        tiny_llama.train()
        assert torch.allclose(tiny_llama(IDS).logits[:, -1], sampled, atol=1e-5)
        assert not torch.equal(train_step(tiny_llama)[5], grads[5])
        assert torch.equal(tiny_llama(IDS).logits, logits), "an evaluation"
    assert {phase for site in noise.ledger.sites for phase in site.by("phase")} == {"rollout", "train"}


def test_origin_05_an_evaluation_that_samples_is_clean(tiny_llama):
    clean = sample(tiny_llama)
    with st.AQN(ON).attach(tiny_llama, 10) as noise:
        sample(tiny_llama)
        fires = noise.ledger.forward
        with st.phase("eval"):
            assert torch.equal(sample(tiny_llama), clean)
        assert noise.ledger.forward == fires


@pytest.mark.parametrize("form", ["weight", "output"])
def test_off_is_off(tiny_llama, form):
    before = [(type(m), set(m.__dict__)) for m in tiny_llama.modules()]
    clean, weights = sample(tiny_llama), copy.deepcopy(tiny_llama.state_dict())
    states = torch.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()
    with st.AQN(st.GlobalDecay(0.05, 0.01, stages=3), form=form).attach(tiny_llama, 3) as noise:
        assert torch.equal(sample(tiny_llama), clean), "stage 0"
        noise.step = 1
        assert not torch.equal(sample(tiny_llama), clean)
        noise.disable()
        assert torch.equal(sample(tiny_llama), clean), "disabled"
        noise.enable()
        assert not torch.equal(sample(tiny_llama), clean)
    assert torch.equal(sample(tiny_llama), clean), "after"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (numpy.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    assert all(torch.equal(v, weights[k]) for k, v in tiny_llama.state_dict().items())
    assert [(type(m), set(m.__dict__)) for m in tiny_llama.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_llama.modules())


@pytest.mark.parametrize("form", ["weight", "output"])
def test_a_resumed_run_draws_what_an_uninterrupted_one_drew(tiny_llama, form):
    aqn = st.AQN(st.EpochAware([(0.1, 0.01)]), form=form, seed=3)
    whole = []
    with aqn.attach(tiny_llama, 6) as noise:
        for step in range(6):
            noise.step = step
            whole.append((sample(tiny_llama), sample(tiny_llama)))
    with aqn.attach(tiny_llama, 6, step=4) as noise:
        for step in (4, 5):
            noise.step = step
            for a, b in zip((sample(tiny_llama), sample(tiny_llama)), whole[step], strict=True):
                assert torch.equal(a, b)
    assert len({x.numpy().tobytes() for pair in whole for x in pair}) == 12


# ---- mistakes of a loop


def test_origin_03_a_loop_that_never_moves_the_step_is_an_error(tiny_llama):
    for aqn in (st.AQN(st.GlobalDecay(0.05, 0.0005)), st.AQN(st.EpochAware([(0.05, 0.01)]))):
        with (
            pytest.raises(st.InertError, match="2 rollouts, and the step stayed at step 0 of 10"),
            aqn.attach(tiny_llama, 10) as noise,
        ):
            for _ in range(2):
                noise.step = 0
                sample(tiny_llama)
    with st.AQN(ON).attach(tiny_llama, 10):
        sample(tiny_llama)
        sample(tiny_llama)


def test_noise_that_never_was_is_an_error(tiny_llama):
    aqn = st.AQN(st.GlobalDecay(0.05, 0.0005))
    with pytest.raises(st.InertError, match="no rollout"), aqn.attach(tiny_llama, 20) as noise:
        noise.step = 9
        tiny_llama(IDS)
    with pytest.raises(st.InertError, match="2 rollouts, none of them with noise"), aqn.attach(tiny_llama, 20) as noise:
        for step in range(2):
            noise.step = step
            sample(tiny_llama)
    with aqn.attach(tiny_llama, 20, allow_inert=True):
        sample(tiny_llama)
    with pytest.raises(ShaketableError, match="σ is 0 at each of 1 steps"):
        aqn.attach(tiny_llama, 1)


def test_the_guide_runs(capsys):
    page = (ROOT / "docs" / "aqn.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert snippets
    exec("\n".join(snippets), {})
    assert capsys.readouterr().out


# ---- noise before or after a fault on the same output


ZONE = "dead_zone:0.3@layer.1"


def survival(model, line, *, noise_first):
    """The share that a dead zone leaves, and what layer 1 returns, with noise of this line; either may be switched on first."""
    out = []
    plan = st.inject(model, ZONE)
    with st.AQN.load(line).attach(model, 1, plan=plan) as noise:
        if not noise_first:
            noise.disable()
        with plan as ledger, noise:
            handle = model.model.layers[1].register_forward_hook(lambda m, a, y: out.append(y))
            with st.phase("rollout"), torch.no_grad():
                model(IDS)
            handle.remove()
    return ledger.sites[0].to_dict()["survival_rate"], out[0]


@pytest.mark.parametrize("noise_first", [True, False])
def test_order_is_the_order_of_noise_and_fault_whichever_was_switched_on_first(tiny_llama, noise_first):
    """Before: what is too small after the noise is 0. After: zeros are lifted by additive noise, and not by relative noise."""
    line = "constant:0.01,form=output,layers=1,unit=absolute"
    with torch.no_grad():
        clean = tiny_llama.model(IDS, output_hidden_states=True).hidden_states[2].abs()
    before, y = survival(tiny_llama, f"{line},order=before", noise_first=noise_first)
    after, z = survival(tiny_llama, f"{line},order=after", noise_first=noise_first)
    assert (y == 0).any() and not (z == 0).any()
    assert before == pytest.approx(float((y != 0).float().mean()), abs=1e-6)
    assert after == pytest.approx(float((clean >= 0.3 * clean.max()).float().mean()), abs=1e-6) != before
    after, z = survival(tiny_llama, "constant:0.5,form=output,layers=1", noise_first=noise_first)
    assert after == pytest.approx(float((z != 0).float().mean()), abs=1e-6), "relative noise leaves a zero a zero"


@pytest.mark.parametrize("order", ["before", "after"])
def test_order_is_kept_when_the_model_is_compiled(tinier_llama, order, fresh_graphs):
    plan = st.inject(tinier_llama, ZONE)
    line = f"constant:0.2,form=output,layers=1,unit=absolute,order={order}"
    with st.AQN.load(line).attach(tinier_llama, 1, plan=plan), plan, st.phase("rollout"), torch.no_grad():
        out = []
        tinier_llama.model.layers[1].register_forward_hook(lambda m, a, y: out.append(y))
        torch.compile(tinier_llama, backend="eager")(IDS)
    assert bool((out[-1] == 0).any()) == (order == "before")

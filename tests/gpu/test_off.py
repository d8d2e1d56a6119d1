"""Laws 1, 2, 4 and 5 on an accelerator: nothing silent, off is off, clean weights come back, phases are kept apart.

Laws 6, 9 and 10 (records, schedules, statistics) never meet a device and are tested once, on the CPU.
"""

import copy

import pytest
import torch

import shaketable as st
from tests.gpu.shaken_device import DEVICE, LEVELS, NOISE, ON_CUDA, every_dtype, every_level, ids, on_device, same, settle, step

pytestmark = on_device


@every_dtype
@every_level
def test_off_and_after_are_bit_identical(tiny_llama, plan, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    clean, weights = step(model), copy.deepcopy(model.state_dict())
    injection = st.inject(model, plan).enable()
    assert not same(step(model), clean)
    injection.disable()
    assert same(step(model), clean)
    injection.enable()
    assert not same(step(model), clean)
    injection.close()
    assert same(step(model), clean)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@every_dtype
def test_magnitude_zero_is_the_identity(tiny_llama, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    clean = step(model)
    for site in ("module.linear", "module.linear,point=weight", "layer.all", "op.all"):
        for fault in ("relative_gaussian:0", "dead_zone:0", "systematic_bias:0", "spike:0", "stuck_bit:0", "bias:0"):
            with st.inject(model, f"{fault}@{site}", allow_inert=True):
                assert same(step(model), clean), (fault, site)


@every_level
def test_the_magnitude_goes_down_to_zero_and_up_again(tiny_llama, plan):
    if "mxfp4" in plan:
        pytest.skip("a format has no magnitude")
    model = tiny_llama.to(DEVICE)
    clean = step(model)
    injection = st.inject(model, plan)
    with injection:
        injection.set_magnitude(0)
        assert same(step(model), clean)
        injection.set_magnitude(0.05)
        assert not same(step(model), clean)


@every_level
def test_nothing_of_us_is_left(tiny_llama, plan):
    model = tiny_llama.to(DEVICE)
    before, modes = [(type(m), set(m.__dict__)) for m in model.modules()], torch.overrides._len_torch_function_stack()
    with st.inject(model, plan):
        model(ids())
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._len_torch_function_stack() == modes


@pytest.mark.parametrize("plan", [*LEVELS, "spike:9,rate=0.1@layer.all", "mxfp4,rounding=stochastic@module.linear"])
def test_global_generators_are_untouched(tiny_llama, plan):
    model = tiny_llama.to(DEVICE)
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if ON_CUDA else [])]
    with st.inject(model, plan):
        step(model)
    now = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if ON_CUDA else [])]
    assert all(torch.equal(a, b) for a, b in zip(states, now, strict=True))


@every_level
def test_a_plan_that_never_fires_raises(tiny_llama, plan):
    with pytest.raises(st.InertError, match="never fired"), st.inject(tiny_llama.to(DEVICE), plan):
        pass


def test_a_plan_that_changes_no_value_raises():
    layer, x = torch.nn.Linear(4, 4).to(DEVICE), torch.ones(1, 4, device=DEVICE)
    with pytest.raises(st.InertError, match="changed no value"), st.inject(layer, "saturation:1@module.linear"):
        for _ in range(5):
            layer(x)


def test_rare_faults_are_not_taken_for_inert():
    layer, x = torch.nn.Linear(64, 64).to(DEVICE), torch.ones(1, 64, device=DEVICE)
    with st.inject(layer, "spike:9,rate=0.0005@module.linear", seed=4) as ledger:
        for _ in range(200):
            layer(x)
    settle()
    assert ledger.forward == 200
    assert ledger.sites[0].measured().changed > 0


def test_a_rollout_is_shaken_and_an_evaluation_is_not(tiny_llama):
    model = tiny_llama.to(DEVICE)
    with torch.no_grad(), st.inject(model, f"{NOISE}@module.linear,phase=rollout") as ledger:
        with st.phase("eval"):
            clean = model(ids()).logits
            assert torch.equal(model(ids()).logits, clean)
        model.generate(ids(), max_new_tokens=2, do_sample=False, pad_token_id=0)
        with st.phase("eval"):
            assert torch.equal(model(ids()).logits, clean)
    settle()
    assert set(ledger.sites[0].by("phase")) == {"rollout"}


@every_dtype
def test_weights_come_back_after_every_rollout(tiny_llama, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    weights, clean = copy.deepcopy(model.state_dict()), model(ids()).logits.detach()
    told = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    quiet = torch.stack(model.generate(ids(), **told).logits)
    with torch.no_grad(), st.AQN(st.Constant(0.2)).attach(model, 10) as noise:
        for number in range(3):
            noise.step = number
            assert not torch.equal(torch.stack(model.generate(ids(), **told).logits), quiet)
            assert torch.equal(model(ids()).logits, clean)
            assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    settle()
    assert noise.ledger.forward == 3 * 9
    assert noise.ledger.to_dict()["sites"][0]["measured_error"] == pytest.approx(0.2, rel=0.2)

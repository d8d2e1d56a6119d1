"""The engine on an accelerator. Skipped where there is none; the last result is in results/gpu.md."""

import functools

import pytest
import torch

import shaketable as st
from tests import tensors
from tests.tensors import same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]

ids = functools.partial(tensors.ids, 32, "cuda")
step = functools.partial(tensors.step, n=32)
PLANS = [
    "relative_gaussian:0.05@module.linear",
    "relative_gaussian:0.05@module.linear,point=weight",
    "dead_zone:0.05,scope=token@layer.all",
    "mxfp4@module.linear",
    "relative_gaussian:0.05@op.all",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PLANS)
def test_off_is_off_and_noise_is_keyed(tiny_llama, plan, dtype):
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = tiny_llama.to("cuda", dtype)
    clean = step(model)
    state = torch.cuda.get_rng_state()
    results = []
    for seed in (1, 1, 2):
        with st.inject(model, plan, seed=seed) as ledger:
            results.append(step(model))
        assert ledger.forward
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert same(results[0], results[1])
    assert not same(results[0], clean)
    if "gaussian" in plan:
        assert not same(results[0], results[2])
    assert same(step(model), clean)


@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_sees_the_noise_of_the_first_pass(tiny_llama, plan):
    model = tiny_llama.cuda().train()
    with st.inject(model, plan, seed=3) as ledger:
        plain = step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with st.inject(model, plan, seed=3) as checkpointed:
        again = step(model)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, again, strict=True))
    assert (checkpointed.forward, checkpointed.backward) == (ledger.forward, ledger.backward)
    assert checkpointed.sites[0].by("layer") == ledger.sites[0].by("layer")


def test_measured_equals_asked(tiny_llama):
    with st.inject(tiny_llama.cuda(), "relative_gaussian:0.05@op.matmul") as ledger:
        step(tiny_llama)
    assert ledger.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)


def test_the_same_key_is_the_same_noise_on_both_devices():
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64)
    ratios = []
    for device in ("cpu", "cuda"):
        here, y = layer.to(device), x.to(device)
        clean = here(y)
        with st.inject(here, "relative_gaussian:0.5@module.linear", seed=1):
            ratios.append((here(y) / clean).cpu())
    assert torch.allclose(*ratios, atol=1e-4)


def test_compiled(tiny_llama):
    model = tiny_llama.cuda()
    with st.inject(model, "relative_gaussian:0.05@op.all") as eager:
        step(model)
    compiled = torch.compile(model)
    clean = compiled(input_ids=ids(), labels=ids()).logits.detach()
    injection = st.inject(model, "relative_gaussian:0.05@op.all")
    with injection as ledger:
        compiled(input_ids=ids(), labels=ids()).loss.backward()
        assert ledger.sites[0].by("layer") == eager.sites[0].by("layer")
        injection.disable()
        assert torch.allclose(compiled(input_ids=ids(), labels=ids()).logits, clean, atol=1e-5)

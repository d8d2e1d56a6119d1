"""Training under noise on an accelerator.

Matrix products of the same numbers at other addresses may be rounded differently, so results are compared closely and not bit by
bit; another key would be off by the noise itself. Bits are compared on a CPU (tests/inject/test_same_everywhere.py).
"""

import pytest
import torch

import shaketable as st
from tests.gpu.shaken_device import DEVICE, ON_CUDA, ids, on_device, settle

pytestmark = on_device
PLANS = [
    "relative_gaussian:0.2@op.matmul",
    "relative_gaussian:0.2@op.matmul,direction=backward",
    "absolute_gaussian:0.01@op.matmul",
    "relative_gaussian:0.2@module.linear",
    "absolute_gaussian:0.01@module.linear",
]
every_plan = pytest.mark.parametrize("plan", PLANS)


def trained(model, plan, steps=2, shapes=(16, 16), micro=1):
    """Losses and gradients of a few steps, and the ledger."""
    found = []
    with st.inject(model, plan, seed=3) as ledger:
        for _ in range(steps):
            model.zero_grad()
            losses = [model(ids(n) + i, labels=ids(n)).loss for i, n in enumerate(shapes[:micro])]
            for loss in losses:
                loss.backward()
            found += [*(x.detach() for x in losses), *(p.grad.clone() for p in model.parameters())]
    settle()
    return found, ledger


def close(a, b, dtype):
    rough = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    for x, y in zip(a, b, strict=True):
        assert x.isfinite().all()
        assert (x - y).float().norm() <= rough * y.float().norm() + 1e-6


@every_plan
@pytest.mark.parametrize("reentrant", [True, False])
def test_also_when_layers_are_computed_twice(tiny_llama, plan, reentrant):
    model = tiny_llama.to(DEVICE).train()
    plain, ledger = trained(model, plan)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again, other = trained(model, plan)
    close(again, plain, torch.float32)
    assert (ledger.forward, ledger.backward) == (other.forward, other.backward)


@every_plan
def test_what_is_measured_is_what_was_asked_for(tiny_llama, plan):
    model = tiny_llama.to(DEVICE).train()
    _, ledger = trained(model, plan, steps=5)
    asked = float(plan.split(":")[1].split("@")[0])
    assert ledger.sites[0].magnitude == pytest.approx(asked, rel=0.05)
    assert ledger.sites[0].measured().fires < ledger.forward + ledger.backward


@pytest.mark.parametrize("plan", PLANS[:1] + PLANS[3:4])
def test_a_stream_of_its_own(tiny_llama, plan):
    """Backward follows the stream of forward, and so do the launches in it."""
    model = tiny_llama.to(DEVICE).train()
    expected, _ = trained(model, plan)
    if ON_CUDA:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found, _ = trained(model, plan)
    else:
        found, _ = trained(model, plan)
    close(found, expected, torch.float32)


def test_the_bias_of_a_product_has_a_faulty_gradient_too():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48)).to(DEVICE)
    x = torch.randn(2, 5, 48, device=DEVICE, requires_grad=True)
    with st.inject(model, PLANS[0], seed=3) as ledger:
        model(x).square().sum().backward()
    settle()
    assert (ledger.forward, ledger.backward) == (2, 6)

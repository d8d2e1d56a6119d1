"""Law 8 on an accelerator: errors belong to their layer, forward and backward, also when a layer is computed twice."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import shaketable as st
from tests.gpu.shaken_device import DEVICE, NOISE, every_dtype, ids, on_device, settle, step
from tests.inject.code_paths import Checkpointed
from tests.inject.recomputation import accumulated_gradients, assert_recomputation_sees_the_same_noise
from tests.tensors import same

pytestmark = on_device
CHECKPOINTED = [
    f"{NOISE}@op.all",
    f"{NOISE}@module.linear",
    f"{NOISE}@module.linear,direction=both",
    "dead_zone:0.05,scope=token@layer.all",
    f"{NOISE}@module.linear,point=weight",
]


@every_dtype
@pytest.mark.parametrize("layer", range(4))
def test_an_error_in_backward_reaches_its_layer_and_those_before(tiny_llama, layer, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    clean = step(model)
    with st.inject(model, f"relative_gaussian:0.5@op.matmul,direction=backward,layers={layer}") as ledger:
        noisy = step(model)
    settle()
    names = ["loss", *(name for name, _ in model.named_parameters())]
    changed = {n for n, a, b in zip(names, clean, noisy, strict=True) if not torch.equal(a, b)}
    assert "loss" not in changed
    assert {int(n.split(".")[2]) for n in changed if ".layers." in n} == set(range(layer + 1))
    assert set(ledger.sites[0].by("layer")) == {str(layer)}
    assert ledger.forward == 0 < ledger.backward


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", CHECKPOINTED)
def test_recomputation_sees_the_noise_of_the_first_pass(tiny_llama, plan, reentrant):
    assert_recomputation_sees_the_same_noise(tiny_llama.to(DEVICE), plan, reentrant, step, settle)


@pytest.mark.parametrize("site", ["module.linear", "op.matmul", "module.linear,point=weight"])
@pytest.mark.parametrize("what", ["leaf", "product", "container"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_whatever_is_checkpointed_sees_the_noise_of_the_first_pass(what, site, reentrant):
    torch.manual_seed(0)
    model, results = Checkpointed(what).to(DEVICE), []
    for how in (None, reentrant):
        x = torch.ones(3, 8, device=DEVICE, requires_grad=True)
        model.zero_grad()
        with st.inject(model, f"{NOISE}@{site}", seed=1) as ledger:
            loss = model(x, how)
            loss.backward()
        settle()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([(ledger.forward, ledger.backward), [loss.detach(), x.grad, *(g.clone() for g in grads)]])
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_accumulated_micro_batches_keep_their_noise_apart(tiny_llama, checkpoint):
    """Two forwards, then both backwards, in either order."""

    def run(order):
        return accumulated_gradients(tiny_llama.to(DEVICE), f"{NOISE}@op.all", order, checkpoint, ids())

    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(run((0, 1)), run((1, 0)), strict=True))


def test_gradients_after_the_context_are_clean(tiny_llama):
    model = tiny_llama.to(DEVICE)
    clean = step(model)
    model.zero_grad()
    with st.inject(model, f"{NOISE}@op.matmul,direction=backward", allow_inert=True) as ledger:
        loss = model(ids(), labels=ids()).loss
    loss.backward()
    assert ledger.backward == 0
    assert same([loss.detach(), *(p.grad for p in model.parameters())], clean)


def test_the_gradient_is_the_fault_s_own():
    layer = nn.Linear(8, 8, bias=False).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    with st.inject(layer, "dead_zone:0.5@module.linear"):
        y = layer(x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).float() @ layer.weight, rtol=1e-4, atol=1e-5)
    x.grad = None
    with st.inject(layer, "relative_gaussian:0.5@module.linear", seed=1):
        y = layer(x)
        y.sum().backward()
    factor = (y / (x @ layer.weight.t())).detach()
    torch.testing.assert_close(x.grad, factor @ layer.weight, rtol=1e-2, atol=1e-2)

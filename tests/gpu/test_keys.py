"""Law 3 on an accelerator: the noise is that of its key, here as on a CPU, and the broken lanes are the same lanes."""

import copy

import pytest
import torch

import shaketable as st
from tests.gpu.shaken_device import DEVICE, NOISE, every_dtype, every_level, ids, on_device, random_levels, same, step

pytestmark = on_device


def two_steps(model, plan, **keys):
    with st.inject(model, plan, **keys):
        return step(model), step(model)


@every_dtype
@random_levels
def test_same_key_same_noise_other_key_other_noise(tiny_llama, plan, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    first, second = two_steps(model, plan, seed=1)
    assert not same(first, second), "every pass has noise of its own"
    again = two_steps(model, plan, seed=1)
    assert same(again[0], first)
    assert same(again[1], second)
    assert not same(two_steps(model, plan, seed=2)[0], first)
    assert not same(two_steps(model, plan, seed=1, rank=1)[0], first)


def test_a_resumed_run_draws_what_an_uninterrupted_one_drew(tiny_llama):
    model, plan, results = tiny_llama.to(DEVICE), f"{NOISE}@op.all", []
    whole = st.inject(model, plan, seed=1)
    with whole:
        for number in range(3):
            whole.step = number
            results.append(step(model))
    assert not same(results[0], results[2]), "every step has noise of its own"
    with st.inject(model, plan, seed=1, step=2):
        assert same(step(model), results[2])


def test_an_evaluation_in_between_does_not_shift_the_noise_of_training(tiny_llama):
    model = tiny_llama.to(DEVICE).train()

    def train(evaluate):
        with st.inject(model, f"{NOISE}@module.linear", seed=1):
            step(model)
            if evaluate:
                with st.phase("eval"), torch.no_grad():
                    model(ids())
            return step(model)

    assert same(train(evaluate=True), train(evaluate=False))


@pytest.mark.parametrize("fault", ["relative_gaussian:0.5", "absolute_gaussian:0.5", "noise:0.5", "spike:9,rate=0.2"])
def test_the_same_key_is_the_same_noise_on_both_devices(fault):
    """On a tensor that both devices hold bit for bit: what differs is the rounding of the fault itself."""
    x = torch.randn(33, 47, generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", DEVICE):
        unit = torch.nn.Identity()
        with st.inject(unit, f"{fault}@module.Identity", seed=1):
            found.append(unit(x.to(device)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0], x)


@every_level
def test_a_whole_step_is_that_of_the_cpu_within_rounding(tiny_llama, plan):
    if "mxfp4" in plan or "dead_zone" in plan:
        pytest.skip("a value at the edge of a rounding or a threshold falls on either side of it")
    there, here = copy.deepcopy(tiny_llama).to(DEVICE), tiny_llama
    with st.inject(there, plan, seed=1):
        found = step(there)
    with st.inject(here, plan, seed=1):
        here.zero_grad()
        tokens = ids().cpu()
        loss = here(tokens, labels=tokens).loss
        loss.backward()
    torch.testing.assert_close(found[0].cpu(), loss.detach(), rtol=1e-3, atol=1e-3)
    for mine, theirs in zip(found[1:], here.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.grad, rtol=0.05, atol=1e-3 * float(theirs.grad.abs().max()) + 1e-6)


def broken_lanes(device, shape, **keys):
    """Which output channels of a linear are not what they should be."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 40).to(device), torch.randn(shape).to(device)
    with st.inject(layer, "gain:1,sparsity=0.25@module.linear", **keys):
        y = layer(x)
    clean = torch.nn.functional.linear(x, layer.weight, layer.bias)
    return (y != clean).flatten(0, -2).any(0).cpu()


@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (2, 3, 8), (64, 8)])
def test_the_broken_lanes_are_those_of_the_cpu(shape):
    here = broken_lanes("cpu", (4, 8), seed=5)
    assert int(here.sum()) == 10
    assert torch.equal(broken_lanes(DEVICE, shape, seed=5), here)
    assert torch.equal(broken_lanes(DEVICE, shape, seed=5, rank=1), here)
    assert not torch.equal(broken_lanes(DEVICE, shape, seed=6), here)


def test_the_broken_lanes_of_a_weight_are_those_of_the_cpu():
    layer, x = torch.nn.Linear(8, 40), torch.eye(8)
    found = []
    for device in ("cpu", DEVICE):
        layer, x = layer.to(device), x.to(device)
        clean = layer(x)
        with st.inject(layer, "gain:1,sparsity=0.25@module.linear,point=weight", seed=5):
            found.append((layer(x) != clean).any(0).cpu())
    assert torch.equal(*found)
    assert int(found[0].sum()) == 10

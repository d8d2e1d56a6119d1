"""Weights made ready and formats without hooks: W4A4 and AQN the fast path, against the ordinary one, on the device itself.

The general path is the same plan on the same model with every fast path shut. On a CPU both are ordinary, and the tests hold.
"""

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import shaketable as st
from shaketable.inject.fast import inputs
from shaketable.inject.weights import on_read
from tests.gpu.shaken_device import DEVICE, ON_CUDA, every_dtype, ids, on_device, settle

pytestmark = on_device
FORMATS = ["mxfp4", "fp8_e4m3,scope=block", "fp8_e4m3,scope=token", "fp8_e5m2,scope=none", "fp8_e4m3", "nvfp4"]
AQN = "rms_gaussian:0.1@module.rmsnorm,point=weight,phase=rollout"


@contextmanager
def ordinary():
    """Hooks everywhere."""
    shut = {"on_gpu": mock.Mock(return_value=False)}
    with mock.patch.multiple(on_read, **shut), mock.patch.multiple(inputs, **shut):
        yield


def told(ledger):
    settle()
    keep = ("forward", "measured_error", "changed_fraction", "survival_rate", "phases", "layers")
    return [{k: site[k] for k in keep} for site in ledger.to_dict()["sites"]]


@torch.no_grad()
def passes(model, plan):
    """Logits of several passes of two sizes, and the ledger."""
    with st.inject(model, plan, seed=3) as ledger:
        found = [model(ids(n)).logits for n in (16, 16, 24, 16, 24, 24)]
    return found, told(ledger)


@every_dtype
@pytest.mark.parametrize("fault", FORMATS)
def test_formats_the_short_way_are_those_of_hooks(tiny_llama, fault, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    clean = model(ids()).logits
    short, ledger = passes(model, f"{fault}@module.linear")
    with ordinary():
        hooked, other = passes(model, f"{fault}@module.linear")
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledger == other
    assert ledger[0]["forward"] == 6 * 28 * 2
    assert not torch.equal(short[0], clean)
    assert torch.equal(model(ids()).logits, clean)


@torch.no_grad()
def test_weights_written_through_data_between_passes_are_seen(tiny_llama):
    model = tiny_llama.to(DEVICE)
    with st.inject(model, "mxfp4@module.linear", seed=3):
        for factor in (1.0, 1.0, 1.7, 0.3):
            for p in model.parameters():
                p.data.mul_(factor)
            found = model(ids()).logits
            twin = copy.deepcopy(model)
            with ordinary(), st.inject(twin, "mxfp4@module.linear", seed=3):
                assert torch.equal(twin(ids()).logits, found)


def held(model, steps=4):
    from shaketable.inject.injection import Injection
    from shaketable.plan import Plan

    injection = Injection(Plan.parse(AQN, seed=1), hold=True)
    injection.attach(model)
    found = []
    with torch.no_grad(), injection as ledger:
        for step in range(steps):
            injection.step = step
            with st.phase("rollout"):
                found += [model(ids()).logits for _ in range(3)]
            found.append(model(ids()).logits)
    return found, ledger


@every_dtype
def test_held_noise_the_short_way_is_that_of_hooks(tiny_llama, dtype):
    model = tiny_llama.to(DEVICE, dtype)
    short, ledger = held(model)
    with ordinary():
        hooked, other = held(model)
    settle()
    for a, b in zip(short, hooked, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 if dtype == torch.float32 else 0.1, rtol=0.02)
    for i in range(0, len(short), 4):
        assert torch.equal(short[i], short[i + 1])
        assert torch.equal(short[i], short[i + 2])
    assert len({y.float().cpu().numpy().tobytes() for y in short}) == 5
    assert ledger.forward == other.forward == 4 * 9
    assert ledger.sites[0].measured().fires == 4 * 9
    assert ledger.sites[0].magnitude == pytest.approx(other.sites[0].magnitude, rel=1e-3)
    assert ledger.sites[0].magnitude == pytest.approx(0.1, rel=0.1)


def test_gradients_between_passes_without_are_those_of_hooks(tiny_llama):
    model = tiny_llama.to(DEVICE)

    def run():
        model.zero_grad()
        with st.inject(model, "mxfp4@module.linear", seed=3) as ledger:
            found = []
            for _ in range(2):
                with torch.no_grad():
                    found += [model(ids()).logits, model(ids()).logits]
                model(ids(), labels=ids()).loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, told(ledger)

    short, ledger = run()
    with ordinary():
        hooked, other = run()
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledger == other


@torch.no_grad()
def test_two_plans_and_inference_mode(tiny_llama):
    model = tiny_llama.to(DEVICE)

    def run():
        found = []
        with st.inject(model, "mxfp4@module.linear", seed=3) as ledger:
            found += [model(ids()).logits for _ in range(3)]
            with st.inject(model, "systematic_bias:0.01@module.linear,point=weight+input") as second:
                found += [model(ids()).logits for _ in range(3)]
            with torch.inference_mode():
                found += [model(ids()).logits.clone() for _ in range(3)]
        return found, told(ledger), told(second)

    short = run()
    with ordinary():
        hooked = run()
    assert all(torch.equal(a, b) for a, b in zip(short[0], hooked[0], strict=True))
    assert short[1:] == hooked[1:]


class Gated(torch.nn.Module):
    """Three linears, of which two are given the same tensor; rows of several blocks, as models have them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(64, 128)
        self.down_proj = torch.nn.Linear(128, 64)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))


@pytest.mark.skipif(not ON_CUDA, reason="the fast path is a GPU's")
@torch.no_grad()
def test_nothing_is_hooked_and_one_launch_makes_all_weights():
    from shaketable.faults.gpu import dispatch

    model, x, launched, original = Gated().to(DEVICE), torch.randn(24, 64, device=DEVICE), [], dispatch.launch

    def launch(kernel, *args, **kwargs):
        launched.append(kernel.__name__)
        return original(kernel, *args, **kwargs)

    with st.inject(model, "mxfp4@module.linear", seed=3) as ledger:
        for _ in range(2):
            model(x)
        with mock.patch.object(dispatch, "launch", launch):
            found = model(x)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.children())
        assert launched == ["quantize_many"], "inputs go through launches that are laid out"
        assert ledger.forward == 3 * 3 * 2
    with ordinary(), st.inject(model, "mxfp4@module.linear", seed=3):
        assert torch.equal(model(x), found)


@pytest.mark.skipif(not ON_CUDA, reason="no CUDA")
@torch.no_grad()
@pytest.mark.parametrize("plan", ["mxfp4@module.linear", "mxfp4@module.linear,point=weight", "mxfp4@module.linear,point=input"])
def test_a_graph_that_is_captured_after_short_passes_is_right(plan):
    model, x = Gated().to(DEVICE), torch.randn(24, 64, device=DEVICE)
    with st.inject(model, plan, seed=3) as ledger:
        for _ in range(3):
            expected = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        before = ledger.forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert ledger.forward == before + 2 * before // 4

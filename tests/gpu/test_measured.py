"""Law 7 on an accelerator: what the ledger measured is what the plan asked for, for every fault that has a magnitude."""

import pytest
import torch
from torch import nn

import shaketable as st
import tests.faults.test_every_fault as generic
from shaketable.faults import MagnitudeFault
from shaketable.faults.sums import SAMPLE
from tests.gpu.shaken_device import DEVICE, every_dtype, ids, on_device, settle, step

pytestmark = on_device
MEASURABLE = [fault for fault in generic.FAULTS if isinstance(fault, MagnitudeFault)]


@every_dtype
@pytest.mark.parametrize("rows", [64, 320], ids=["all values", "a sample"])
@pytest.mark.parametrize("sparsity", ["", ",sparsity=0.25"])
@pytest.mark.parametrize("fault", MEASURABLE, ids=lambda f: f.text())
def test_measured_equals_asked_for_every_fault(fault, sparsity, rows, dtype):
    assert (rows * 256 <= SAMPLE) == (rows == 64)
    torch.manual_seed(0)
    layer = nn.Linear(64, 256).to(DEVICE, dtype)
    with st.inject(layer, f"{fault.text()}{sparsity}@module.linear", seed=1) as ledger, torch.no_grad():
        for _ in range(16):
            layer(torch.randn(rows, 64, device=DEVICE, dtype=dtype))
    settle()
    site = ledger.to_dict()["sites"][0]
    assert site["forward"] == 16
    assert site["asked"] == fault.magnitude
    assert site["measured_magnitude"] == pytest.approx(fault.magnitude, rel=0.15)
    assert site["remark"] is None
    assert 0 < site["changed_fraction"] <= (0.26 if sparsity else 1)


@pytest.mark.parametrize(
    "plan", ["relative_gaussian:0.05@module.linear", "mxfp4@module.linear,point=input", "gain:0.1@op.matmul"]
)
def test_a_process_that_goes_on_measures_what_one_alone_would_have(tiny_llama, plan):
    def part(steps, counted=None):
        model = tiny_llama.to(DEVICE)
        injection = st.inject(model, plan, seed=1).enable()
        if counted is not None:
            injection.go_on(counted)
        for number in steps:
            injection.step = number
            model(ids())
        counted = injection.counted()
        injection.close(check=False)
        return [(s.forward, s.measured().fires) for s in injection.ledger.sites], counted

    whole, _ = part(range(20))
    first, counted = part(range(7))
    second, _ = part(range(7, 20), counted)
    assert [tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(first, second, strict=True)] == whole


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("site", ["module.linear", "module.linear,point=weight", "layer.all", "op.matmul"])
def test_measured_equals_asked_at_every_level(tiny_llama, scale, site):
    model = tiny_llama.to(DEVICE)
    with st.inject(model, f"relative_gaussian:{scale}@{site}") as ledger:
        step(model)
    settle()
    record = ledger.to_dict()["sites"][0]
    assert record["measured_magnitude"] == pytest.approx(scale, rel=0.05)
    assert record["measured_error"] == pytest.approx(scale, rel=0.2)
    assert record["remark"] is None
    if site == "op.matmul":
        assert record["measured_error_backward"] == pytest.approx(scale, rel=0.2)


def test_what_the_type_swallows_is_said(tiny_llama):
    model = tiny_llama.to(DEVICE, torch.bfloat16)
    with st.inject(model, "relative_gaussian:1e-3@module.linear") as ledger:
        model(ids())
        model(ids())
    settle()
    assert "asked for 0.001" in ledger.to_dict()["sites"][0]["remark"]


@pytest.mark.parametrize(
    "plan", ["relative_gaussian:0.05@module.linear", "mxfp4@module.linear", "relative_gaussian:0.05@op.all"]
)
def test_the_ledger_counts_what_it_counts_on_a_cpu(tiny_llama, plan):
    counted = []
    for device in ("cpu", DEVICE):
        model = tiny_llama.to(device)
        tokens = ids().to(device)
        with st.inject(model, plan, seed=1) as ledger:
            for _ in range(5):
                model(tokens, labels=tokens).loss.backward()
        settle()
        site = ledger.sites[0]
        counted.append([site.matched, site.forward, site.backward, site.by("layer"), site.by("phase")])
    assert counted[0] == counted[1]

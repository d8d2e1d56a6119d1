"""What must hold on an accelerator that is not CUDA. `test_npu.py` runs these on the stand-in, in a process of its own."""

import pytest
import torch

import shaketable as st
from shaketable.compare.compare import compare
from shaketable.compare.fingerprint import fingerprint
from shaketable.evaluate.layers import mechanism
from shaketable.evaluate.tasks import load_task
from shaketable.faults import Draw
from shaketable.harden.results import outcome
from shaketable.harden.run import Hardening
from shaketable.models import load_model
from shaketable.plan import Plan
from shaketable.records.environment import gather
from shaketable.records.record import RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.warm_start import warm_start
from tests.faults.test_every_fault import FAULTS, gaussian
from tests.harden.small_runs import small
from tests.tensors import same, same_bits, step

PLANS = [
    "relative_gaussian:0.05@module.linear",
    "relative_gaussian:0.05@module.linear,point=weight",
    "relative_gaussian:0.05@op.all",
    "dead_zone:0.05,scope=token@layer.all",
    "mxfp4@module.linear,point=weight+input",
    "bit_flip:0.05,bit=3,sparsity=0.5@layer.1",
]


@pytest.fixture(scope="module")
def nano():
    return load_model("nano", device="npu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.text())
def test_a_fault_has_the_bits_that_it_has_on_the_cpu(fault, dtype):
    x = gaussian(24, 40, dtype=dtype)
    here, there = (fault.apply(on, Draw(7, reference=fault.reference(on))) for on in (x, x.to("npu")))
    assert there.device.type == "npu"
    assert same_bits(here, there.cpu()) or torch.allclose(here, there.cpu(), rtol=1e-6, atol=1e-6), (
        "a square root may round otherwise"
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_acts_is_proven_and_leaves_nothing(tiny_llama, plan):
    here = step(tiny_llama)
    model = tiny_llama.to("npu")
    clean, state = step(model), torch.npu.get_rng_state()
    with st.inject(model, plan, seed=1) as ledger:
        results = [step(model) for _ in range(2)]
    with st.inject(model, plan, seed=1):
        again = step(model)
    assert {r.device.type for r in results[0]} == {"npu"}
    assert not same(results[0], clean) and same(results[0], again)
    assert ledger.forward and ledger.sites[0].measured().error > 0
    assert ledger.kernel == "torch", "there is no C++ and no Triton there"
    assert same(step(model), clean) and torch.equal(torch.npu.get_rng_state(), state)
    assert all(torch.allclose(a, b.cpu(), rtol=1e-4, atol=1e-6) for a, b in zip(here, clean, strict=True))


@pytest.mark.parametrize("plan", [None, "gain:0.01@layer.2", "truncation:4@module.down_proj,layers=1"])
def test_locate_judges_the_device(nano, plan):
    found = st.locate(*nano, plan=plan)
    assert found.device == torch.npu.get_device_name()
    assert found.verdict == ("HEALTHY" if plan is None else "FAULT")
    assert plan is None or found.layer == int(plan[-1])


def test_another_device_is_compared_with_the_cpu(nano):
    record = fingerprint(load_model("nano")[0], input_ids=torch.arange(1, 25).view(1, 24))
    assert compare(record, nano[0]).exit_code == 0
    with st.inject(nano[0], "gain:0.01@layer.2"):
        found = compare(record, nano[0])
    assert found.exit_code == 1 and found.first.layer == 2


def test_layers_are_read(nano):
    pairs = [([3, 4, 5], [6, 7]), ([8, 9], [10])]
    plan = Plan.parse("dead_zone:0.05,scope=token@layer.1")
    here, there = (mechanism(m, pairs, plan, pad=0) for m in (load_model("nano")[0], nano[0]))
    assert there.loss == pytest.approx(here.loss, rel=1e-4)
    assert [layer.survival for layer in there.layers] == pytest.approx([layer.survival for layer in here.layers], abs=0.01)


def test_a_model_is_hardened(tmp_path):
    config = small(device="npu", steps=4, batch=8)
    run = Hardening(config, RunRecord.create(tmp_path / "run", "harden", config.model_dump(mode="json"), {}), None)
    run.run()
    assert run.students.model.device.type == "npu"
    assert outcome(run.record)["rungs"]


def test_a_warm_start_uses_up_nobodys_random_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path))
    config = TrainConfig.checked(model="nano", task="arithmetic", device="npu", steps=1, warm_start=1)
    state = torch.npu.get_rng_state()
    facts = warm_start(config, load_task("arithmetic"), *load_model("nano", device="npu"), lambda kind, facts: None)
    assert facts["device"] == f"npu ({torch.npu.get_device_name()})"
    assert torch.equal(torch.npu.get_rng_state(), state)


def test_tied_weights_stay_tied(nano):
    assert nano[0].lm_head.weight is nano[0].model.embed_tokens.weight


def test_a_record_names_the_device():
    assert gather()["device"].startswith("npu")

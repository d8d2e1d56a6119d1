"""Hardening runs: what they recover, what is refused, and that a kill costs nothing."""

import json

import pytest
import torch

from shaketable.errors import InertError, ShaketableError
from shaketable.harden.results import outcome
from shaketable.models import load_model
from tests.harden.small_runs import HURTS, gone_on, hardened, prepared, same_weights, weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Long enough to help."""
    return hardened(tmp_path_factory.mktemp("ladder") / "run", steps=40, batch=32, eval_n=100, save_every=20)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def steps(run, *names):
    return [tuple(e[n] for n in ("step", "loss", "grad_norm", "plan", *names)) for e in run.record.events("step")]


def test_what_the_fault_takes_comes_back(run):
    found = outcome(run.record)
    (rung,) = found["rungs"]
    share = rung["shares"]["plan"]
    assert share["share"] > 0.3
    assert share["interval"]["low"] > 0
    clean, faulty = rung["conditions"]
    assert clean["accuracy"] > found["before"][0]["accuracy"] - 0.08
    assert faulty["kl"] < found["before"][1]["kl"] / 2
    assert rung["cost"]["sequences"] == 40 * 32


def test_every_number_has_its_proof(run):
    finished = run.record.events("finished")[-1]
    assert finished["ledgers"][HURTS]["forward"] == 20, "every second of the 40 steps is without the fault"
    for evaluation in run.record.events("evaluation"):
        clean, faulty = evaluation["conditions"]
        assert clean["ledger"] is None
        assert faulty["injections"] > 0
    assert [e["plan"] for e in run.record.events("step")] == [0, None] * 20


def test_the_model_is_an_ordinary_folder_with_a_card(run):
    folder = run.record.folder / "model"
    model, tokenizer = load_model(str(folder))
    assert tokenizer.eos_token_id is not None
    assert all(torch.isfinite(p).all() for p in model.parameters())
    card = (folder / "README.md").read_text()
    assert HURTS in card
    assert "recovered" in card
    assert outcome(run.record)["sentence"] in card


@pytest.mark.slow
def test_a_run_that_stopped_anywhere_goes_on_to_the_same_bits(tmp_path):
    whole = hardened(tmp_path / "whole")

    class Stop(BaseException):
        pass

    for at in (1, 5, "distil"):

        def tell(kind, facts, at=at):
            if (kind == "step" and facts["step"] == at) or (kind == "evaluation" and facts.get("rung") == at):
                raise Stop

        folder = tmp_path / f"stopped-{at}"
        with pytest.raises(Stop):
            hardened(folder, tell)
        run = gone_on(folder)
        assert same_weights(folder, whole.record.folder), at
        assert steps(run) == steps(whole)
        ledgers = [r.record.events("finished")[-1]["ledgers"][HURTS]["forward"] for r in (run, whole)]
        assert ledgers[0] == ledgers[1], at


@pytest.mark.slow
def test_several_plans_take_turns(tmp_path):
    noise = "relative_gaussian:0.5@module.linear"
    run = hardened(tmp_path / "run", plans=(HURTS, noise), clean_every=0, steps=8)
    assert {e["plan"] for e in run.record.events("step")} == {0, 1}
    assert set(outcome(run.record)["rungs"][0]["shares"]) == {HURTS, noise}
    fired = run.record.events("finished")[-1]["ledgers"]
    assert all(fired[plan]["forward"] > 0 for plan in (HURTS, noise))


@pytest.mark.slow
def test_adapters_need_no_second_copy_and_end_in_ordinary_weights(tmp_path):
    run = hardened(tmp_path / "run", lora=4, steps=4, clean_every=0)
    assert run.students.clean is None
    finished = run.record.events("finished")[-1]
    assert finished["merging_changed_logits_by"] < 1e-3
    names = set(weights(tmp_path / "run"))
    assert not any("lora" in name for name in names)
    clean, _ = load_model("nano", dtype=torch.float32)
    trained, _ = load_model(str(tmp_path / "run" / "model"), dtype=torch.float32)
    assert not same(dict(clean.named_parameters()), dict(trained.named_parameters()))
    first = steps(run)[0][1]
    assert first == pytest.approx(steps(hardened(tmp_path / "full", steps=4, clean_every=0))[0][1], rel=1e-4)


@pytest.mark.slow
def test_prompts_alone_are_enough(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{a}+{b}="}) for a in range(10, 20) for b in range(30, 40)))
    found = outcome(
        hardened(tmp_path / "run", task=None, prompts=str(file), max_new_tokens=6, steps=30, batch=32, clean_every=0).record
    )
    assert found["measure"] == "agreement"
    assert found["before"][0]["accuracy"] == 1
    assert found["before"][1]["accuracy"] < 1
    (rung,) = found["rungs"]
    assert rung["conditions"][1]["kl"] < found["before"][1]["kl"]


def test_a_control_trains_without_any_fault(tmp_path):
    run = hardened(tmp_path / "run", plans=(), conditions={"faulty": HURTS}, steps=2)
    assert [e["plan"] for e in run.record.events("step")] == [None, None]
    assert run.record.events("finished")[-1]["ledgers"] == {}


def test_a_plan_that_never_fires_ends_the_run(tmp_path):
    with pytest.raises(InertError, match="in its first step"):
        prepared(tmp_path / "run", plans=("gain:0.0@layer.3",), conditions={"faulty": HURTS}).run()


def test_too_little_memory_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("shaketable.harden.distil.forward_kl", full)
    with pytest.raises(ShaketableError, match="not enough memory to distil: start again with --micro-batch 4"):
        hardened(tmp_path / "run")

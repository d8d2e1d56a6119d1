"""A whole run in this process: where the noise was, when it was scored, and that off is off."""

import pytest
import torch

from shaketable.errors import InertError
from shaketable.models import NANO, load_model
from shaketable.train.checkpoints import sealed
from tests.train.training_runs import prepared, trained, weights

NOISE = "relative_gaussian:0.2@op.matmul"
LOUD_AQN = "constant:0.3"
NORMS = 17  # two in each of eight layers, and the last


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A run that never heard of faults."""
    return trained(tmp_path_factory.mktemp("clean") / "run")


def final(training):
    return weights(training.record.folder / "model")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def facts(training, *names):
    """Of every step, what does not depend on the clock."""
    return [tuple(e[name] for name in ("step", "loss", "reward", "entropy", *names)) for e in training.record.events("step")]


def fires(training, name):
    """Forward and backward, per phase, as the record has it."""
    (finished,) = training.record.events("finished")
    total = {}
    for site in finished["ledgers"][name]["sites"]:
        for phase, counts in site["phases"].items():
            row = total.setdefault(phase, [0, 0])
            row[0] += counts["forward"]
            row[1] += counts["backward"]
    return total


def test_a_run_learns_something_and_records_every_step_once(clean):
    assert [e["step"] for e in clean.record.events("step")] == [1, 2, 3]
    assert [e["step"] for e in clean.record.events("evaluation")] == [0, 3]
    assert not same(final(clean), weights(NANO))
    event = clean.record.events("step")[-1]
    assert {"loss", "reward", "entropy", "zero_variance", "grad_norm", "sigma", "kl_sampler_trainer", "ratio_tail"} <= set(
        event
    )
    assert event["tokens_per_second"] > 0 and 0 < event["sampling_seconds"] < event["seconds"]
    (resolved,) = clean.record.events("resolved")
    assert resolved["config"]["lr"] == 1e-3 and resolved["config"]["steps"] == 3


def test_the_same_configuration_is_the_same_run_whatever_the_global_generator_did(clean, tmp_path):
    torch.manual_seed(12345)
    again = trained(tmp_path / "run")
    assert facts(again) == facts(clean)
    assert same(final(again), final(clean))


def test_law_2_a_plan_for_scores_only_changes_no_bit_of_training(clean, tmp_path):
    plan = "relative_gaussian:0.5@op.matmul"
    scored = trained(tmp_path / "run", eval_plans=(plan,), eval_every=1)
    assert same(final(scored), final(clean))
    assert facts(scored) == facts(clean)
    assert fires_in_scores(scored, plan) and scored.record.events("finished")[0]["ledgers"] == {}


def fires_in_scores(training, name="plan"):
    found = [c for e in training.record.events("evaluation") for c in e["conditions"] if c["name"] == name]
    assert all(set(s["phases"]) == {"eval"} for c in found for s in c["ledger"]["sites"])
    return all(c["injections"] > 0 for c in found) and found


def test_law_2_as_long_as_sigma_is_0_a_run_with_aqn_is_the_run_without(clean, tmp_path):
    noisy = trained(tmp_path / "run", aqn="global_decay:0.5-0.3,stages=3")
    assert [e["sigma"] for e in noisy.record.events("step")] == pytest.approx([0, 0.5, 0.3])
    assert facts(noisy)[0] == facts(clean)[0]
    assert facts(noisy)[1:] != facts(clean)[1:]
    assert fires(noisy, "aqn") == {"rollout": [2 * NORMS, 0]}, "none at the first step"


@pytest.mark.slow
@pytest.mark.parametrize(("plan_in", "phases"), [("both", {"rollout", "train"}), ("rollout", {"rollout"}), ("loss", {"train"})])
def test_the_plan_acts_in_the_phases_asked_for_and_no_other(clean, tmp_path, plan_in, phases):
    run = trained(tmp_path / "run", plan=NOISE, plan_in=plan_in)
    found = fires(run, "plan")
    assert set(found) == phases
    assert all(forward > 0 for forward, _ in found.values())
    assert found.get("train", [0, 1])[1] > 0, "and in the backward of the loss"
    assert found.get("rollout", [1, 0])[1] == 0
    assert not same(final(run), final(clean))
    assert fires_in_scores(run)
    kl = [e["kl_sampler_trainer"] for e in run.record.events("step")]
    assert max(kl) > 1e-6


@pytest.mark.parametrize(
    "noise",
    [
        {"plan": "relative_gaussian:0.3@module.linear,point=weight"},
        {"plan": "mxfp4@module.linear", "aqn": LOUD_AQN, "eval_every": 1},
    ],
)
def test_law_4_noise_is_never_saved(tmp_path, noise):
    """With a learning rate of next to nothing every saved weight is the one that the run began with."""
    run = trained(tmp_path / "run", lr=1e-30, save_every=1, **noise)
    begin = weights(NANO)
    saved = [final(run), *(weights(folder) for folder in sealed(run.record.folder))]
    assert len(saved) == 3
    for found in saved:
        assert found.keys() == begin.keys()
        assert all(torch.allclose(found[k], begin[k], rtol=0, atol=1e-25) for k in begin)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.policy.modules()), "and nothing is left on the model"


def test_a_plan_that_never_fires_in_the_first_step_ends_the_run_there(tmp_path):
    training = prepared(tmp_path / "run", plan=f"{NOISE},direction=backward", plan_in="rollout")
    with pytest.raises(InertError, match="never fired in the first step"):
        training.run()
    assert training.record.events("step", "finished") == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in training.policy.modules())


@pytest.mark.slow
def test_lora_trains_adapters_and_nothing_else(tmp_path):
    run = trained(tmp_path / "run", lora=4)
    learning = {name for name, p in run.policy.named_parameters() if p.requires_grad}
    assert learning and all("lora_" in name for name in learning)
    begin = load_model("nano")[0].state_dict()
    for name, value in run.policy.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(value, begin[name.replace(".base_layer", "")]), name
    files = {p.name for p in (run.record.folder / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files
    moved = weights_of_adapter(run.record.folder / "model")
    assert any(float(v.abs().max()) > 0 for k, v in moved.items() if "lora_B" in k), "B begins at zero"


def weights_of_adapter(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")

"""verl with the keys of the origin study: the same dead channels in sampler and actor, noise of each layer, real updates.

A dead zone is no noise: where sampler and actor have the same one, they agree to the last digits; where their masks differ,
or one of them has none, they do not. The first tenth of the schedule is silent, so the first step is about the dead zone
alone. The reference has no dead zone, so the policy's distance from it is not 0 although no update has been made.
"""

import json
import os
import subprocess
import sys

import pytest

from shaketable.integrations.common.worker_report import read_reports
from tests.frameworks.verl.tiny_run import ENVIRONMENT, HERE, make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "the origin's keys: dead zone and guided AQN in both", "eager, Ray, FSDP2")

KEYS = [
    *("+deadzone.enabled=true", "+deadzone.layer=3", "+deadzone.threshold=0.3", "+deadzone.sparsity=0.5"),
    *("+aqn.enabled=true", "+aqn.layer_specific=true", "+aqn.base_sigma=0.2", "+aqn.layer_sigmas={3: 0.3}"),
    "+aqn.schedule=global_decay",
]
BY_MODULE = {
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.for_verl,shaketable.integrations.verl",
}
"""verl without its entry points."""
AS_PRINTED = [
    *("trainer.hw_error_injection.enabled=True", "trainer.hw_error_injection.error_scale=1e-5"),
    *("trainer.hw_error_injection.target_modules=['linear']", "trainer.hw_error_injection.apply_during=never"),
]
"""Without +, as the origin's documents have them, and one value that stops the run: Hydra has taken the keys by then."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("origin"), train=12)
    done = run_example("baseline.sh", folder, *KEYS, "trainer.val_before_train=False")
    assert done.exit == 0, done.text[-6000:]
    assert len(done.steps) == 3 and any(step["actor/grad_norm"] > 0 for step in done.steps)
    return done


@pytest.fixture(scope="module")
def ledgers(run):
    """The folder of ledgers is beside the checkpoints when none is named."""
    (folder,) = (run.folder / "out" / "shaketable").iterdir()
    return folder


def test_the_keys_become_a_plan_and_aqn_that_are_printed(run):
    start = run.text.split("Started a local Ray instance")[0]
    assert "deadzone → dead_zone:0.3,scope=token,sparsity=0.5@layer.3,phase=rollout+train" in start
    assert "aqn → global_decay:0.2-0.002,stages=10,form=output,multipliers=3:1.5,where=both" in start


def test_sampler_and_actor_have_the_same_dead_channels(run):
    assert run.steps[0]["shaketable/sigma"] == 0
    assert run.steps[0]["shaketable/kl"] < 1e-6


def test_the_dead_zone_is_in_both_and_not_in_the_reference(run, ledgers):
    merged = json.loads((ledgers / "ledger.json").read_text())["merged"]
    for role in ("sampler.plan", "actor.plan"):
        (site,) = merged[role]["sites"]
        assert list(site["spots"]) == ["model.layers.3"]
        assert 0.1 < site["changed_fraction"] < 0.5, "half of the channels are broken"
    losses = [step["actor/kl_loss"] for step in run.steps]
    assert min(losses) > 0
    assert max(losses) > 1e-5, "a step whose answers the model is sure of has next to none"


def test_noise_of_each_layer_acts_in_both_as_the_origin_had_it(run, ledgers):
    lines = [json.loads(line) for line in (ledgers / "steps.jsonl").read_text().splitlines()]
    (layers,) = lines[1]["sigmas"].values()
    assert layers["3"] == pytest.approx(1.5 * layers["4"]) and layers["4"] == lines[1]["shaketable/sigma"] > 0
    reports = {report["role"]: report for report in read_reports(ledgers)}
    for role, phase in (("sampler", "rollout"), ("actor", "train")):
        assert {name for site in reports[role]["aqn"]["sites"] for name in site["phases"]} == {phase}
    for step in run.steps[1:]:
        assert step["shaketable/kl"] > 1e-6, "each side draws its own"


@pytest.mark.parametrize(
    ("overrides", "message", "variables"),
    [
        (["+shaketable.resolved.ledger=/elsewhere"], "shaketable.resolved was written by another run", {}),
        (AS_PRINTED, "trainer.hw_error_injection.apply_during: Input should be", {}),
        (["+shaketable.seed=1"], "shaketable has neither a plan nor an aqn", BY_MODULE),
    ],
)
def test_a_bad_key_ends_the_program_before_ray_is_started(tmp_path, overrides, message, variables):
    env = os.environ | ENVIRONMENT | variables
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "cpu_shims"), env["PYTHONPATH"]])
    needed = ["trainer.device=cpu", "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.strategy=fsdp2"]
    needed += [f"actor_rollout_ref.{k}micro_batch_size_per_gpu=1" for k in ("actor.ppo_", "rollout.log_prob_", "ref.log_prob_")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.name=vllm", *needed, *overrides]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"shaketable: {message}")
    assert "Traceback" not in done.stderr
    assert "ray init kwargs" not in done.stdout

"""verl alone with the keys of the origin study; and configs that end before anything is started."""

import os
import subprocess
import sys

import pytest

from shaketable.integrations.common.worker_report import read_reports
from tests.frameworks.verl.tiny_run import ENVIRONMENT, HERE, make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "the origin's keys", "eager, Ray, FSDP2")

KEYS = [
    *("+deadzone.enabled=true", "+deadzone.layer=3", "+deadzone.threshold=0.3"),
    *("+aqn.enabled=true", "+aqn.target_layers=[3]", "+aqn.sigma=0.05", "+aqn.schedule=constant"),
]
VARIABLES = {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "0.05", "VERL_NOISY_OPS_TYPE": "relative_gaussian"}

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
    done = run_example("baseline.sh", folder, *KEYS, "trainer.val_before_train=False", **VARIABLES)
    assert done.exit == 0, done.text[-6000:]
    return done


@pytest.fixture(scope="module")
def reports(run):
    (folder,) = (run.folder / "out" / "shaketable").iterdir()
    return {report["role"]: report for report in read_reports(folder)}


def test_the_origins_keys_and_variables_become_a_plan_and_aqn_that_are_printed(run):
    start = run.text.split("Started a local Ray instance")[0]
    assert "trainer.noisy_ops → relative_gaussian:0.05@op.matmul,phase=rollout+train" in start
    assert "deadzone → dead_zone:0.3,scope=token@layer.3,phase=rollout+train" in start
    assert "aqn → constant:0.05,form=output,layers=3,where=both" in start


def test_faults_act_in_sampler_and_actor(run, reports):
    """The ledgers are beside the checkpoints when no folder is named."""
    assert sorted(reports) == ["actor", "sampler"]
    for report in reports.values():
        noise, dead = report["plan"]["sites"]
        assert noise["measured_magnitude"] == pytest.approx(0.05, rel=0.1)
        assert dead["survival_rate"] < 0.9
    assert reports["actor"]["plan"]["sites"][0]["backward"] > 0
    assert len(run.steps) == 3
    kl = [step["shaketable/kl"] for step in run.steps]
    assert max(kl) > 1e-5 and min(kl) > 0, "of completions that the model is sure of it is nearly 0"


def test_noise_on_outputs_acts_in_both_as_the_origin_had_it(reports):
    phases = {"sampler": "rollout", "actor": "train"}
    for role, report in reports.items():
        (site,) = report["aqn"]["sites"]
        assert list(site["spots"]) == ["model.layers.3"]
        assert list(site["phases"]) == [phases[role]]
        assert site["measured_magnitude"] == pytest.approx(0.05, rel=0.15)


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

"""Every release of verl, at its real entry points: what nobody would read is refused before Ray is started.

Releases other than the installed one are fetched from PyPI without what they depend on, once, and put in front of the
environment. Their programs compose their own configs with the real Hydra, and are let go no further than to `ray.init`.
"""

import os
import subprocess
import sys

import pytest

from shaketable.integrations.job_keys import READ
from tests.frameworks.verl.tiny_run import ENVIRONMENT, HERE, release

pytestmark = pytest.mark.covers("verl", "releases 0.4.1 to 0.9.1: keys that nobody would read are refused", "Hydra, no Ray")

BEFORE_PLUGINS = ("0.4.1", "0.6.1", "0.8.0")
PLAN = "+shaketable.plan=relative_gaussian:0.05@op.matmul"
PPO = "verl.trainer.main_ppo"
NEEDED = (
    *("trainer.device=cpu", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm"),
    *(f"actor_rollout_ref.{k}micro_batch_size_per_gpu=1" for k in ("actor.ppo_", "rollout.log_prob_", "ref.log_prob_")),
)
START = """
import runpy, sys
import transformers
if not hasattr(transformers, "AutoModelForVision2Seq"):  # releases of verl that are older than its renaming
    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
import ray
def init(*args, **kwargs):
    print("RAY WAS STARTED", flush=True)
    raise SystemExit(0)
ray.init = init
name = sys.argv.pop(1)
sys.argv[0] = name
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
"""Runs a module as `python -m` does, with a Ray that only says that it was started."""


def start(version, tmp_path, module, *overrides, **variables):
    env = os.environ | ENVIRONMENT | variables
    folder = release(version)
    shims = [str(folder)] if folder is not None else [str(HERE / "cpu_shims")]
    if folder is not None:
        env.pop("VERL_PLATFORM")
    env["PYTHONPATH"] = os.pathsep.join([*shims, env["PYTHONPATH"]])
    command = [sys.executable, "-c", START, module, *overrides]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)


def refusal(done):
    """The line that a program ended with, before it started Ray."""
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert "RAY WAS STARTED" not in done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("version", BEFORE_PLUGINS)
def test_a_release_without_plugins_is_refused_with_the_releases_that_work(version, tmp_path):
    line = refusal(start(version, tmp_path, PPO, PLAN))
    assert (
        f"of verl {version} does not read shaketable.plan: nothing would be injected; verl.trainer.main_ppo of verl 0.9.0"
        in line
    )
    assert "shaketable run --plan relative_gaussian:0.05@op.matmul -- " in line


@pytest.mark.parametrize("version", ["0.8.0", "0.4.1"])
def test_without_our_keys_an_old_release_goes_its_way(version, tmp_path):
    done = start(version, tmp_path, PPO)
    assert "RAY WAS STARTED" in done.stdout, done.stderr[-4000:]
    assert "shaketable:" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("version", "module"), [("0.4.1", "verl.trainer.fsdp_sft_trainer"), ("0.9.1", "verl.trainer.sft_trainer")]
)
def test_sft_trainers_read_nothing(version, module, tmp_path):
    line = refusal(start(version, tmp_path, module, PLAN))
    assert f"of verl {version} does not read shaketable.plan" in line


def test_switched_off_plugins_are_named(tmp_path):
    line = refusal(start("0.9.1", tmp_path, PPO, *NEEDED, PLAN, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM=""))
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves it out" in line


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_the_oldest_and_the_newest_release_that_read_the_keys(version, tmp_path):
    eager = "actor_rollout_ref.rollout.enforce_eager=True"
    overrides = (eager, "actor_rollout_ref.actor.strategy=fsdp2", f"trainer.default_local_dir={tmp_path / 'out'}")
    done = start(version, tmp_path, PPO, *NEEDED, PLAN, *overrides, **{READ: str(tmp_path / "read")})
    assert "shaketable: samplers: plan relative_gaussian:0.05@op.matmul,phase=rollout+train (seed 0)" in done.stdout
    assert done.stdout.index("shaketable: actors: plan") < done.stdout.index("RAY WAS STARTED")
    assert (tmp_path / "read").is_file(), "`shaketable run` would know"


@pytest.mark.parametrize(("plugins", "works"), [("auto", True), ("none", False)])
def test_a_task_runner_without_our_plugin_has_no_trainer_of_that_name(plugins, works, tmp_path):
    """The driver names the trainer so; a process in which the plugin is missing stops before it has made anything."""
    code = "from verl.trainer.ppo.v1 import get_trainer_cls; print('made of', get_trainer_cls('shaketable_sync'))"
    env = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ("PPOTrainerSync" in done.stdout) is works
    assert ("ValueError: Unknown trainer 'shaketable_sync'" in done.stderr) is not works

"""The launch scripts of examples/verl hand verl the sizes of the origin's study, and what each of them adds.

A stand-in for `python` prints what verl would have been given; `shaketable locate` and `guide` are the real ones.
"""

import os
import shlex
import subprocess
import sys

import pytest

from shaketable.aqn.spec import AQN
from tests import ROOT

STAND_IN = f"""#!/bin/sh
case "$*" in
  "-m shaketable run -- python -m verl"*|"-m verl"*) printf '%s\\n' "$@" ;;
  *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


def recipe(script, folder, *more, **environment):
    """What a script would have run, as a list of arguments, and its overrides by key."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    env = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")} | environment
    command = ["bash", str(ROOT / "examples" / "verl" / script), *more]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout[max(done.stdout.rfind("-m\nshaketable\nrun"), 0) :].splitlines()
    return done, lines, dict(line.partition("=")[::2] for line in lines if "=" in line)


@pytest.mark.parametrize("script", ["baseline.sh", "operator_noise.sh", "aqn_epoch_aware.sh"])
def test_sizes_are_those_of_the_documents(tmp_path, script):
    _, _, keys = recipe(script, tmp_path)
    assert (keys["data.train_batch_size"], keys["actor_rollout_ref.actor.optim.lr"]) == ("128", "5e-7")
    assert 7473 // int(keys["data.train_batch_size"]) * int(keys["trainer.total_epochs"]) == 116
    assert keys["actor_rollout_ref.rollout.n"] == "5"
    answers = int(keys["actor_rollout_ref.actor.ppo_mini_batch_size"]) * 5 // int(keys["trainer.n_gpus_per_node"])
    assert answers % int(keys["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"]) == 0
    assert int(keys["trainer.save_freq"]) > 0, "something to score"


def test_what_has_a_fault_runs_under_shaketable_run_and_is_validated_both_ways(tmp_path):
    _, lines, keys = recipe("operator_noise.sh", tmp_path)
    assert lines[:7] == ["-m", "shaketable", "run", "--", "python", "-m", "verl.trainer.main_ppo"]
    assert keys["+shaketable.plan"] == "'relative_gaussian:0.05@op.matmul'"
    assert keys["+shaketable.validate"] == "both"


@pytest.mark.parametrize(("target", "layers"), [("fault", ",layers=3"), ("all", ""), ("healthy", ",layers=0-2+4-7")])
def test_guided_aqn_is_guided_by_the_fault(tmp_path, target, layers):
    """The layer that locate finds is the one that gets the noise: Model A of the origin's design."""
    done, _, keys = recipe("srdd_guided.sh", tmp_path, MODEL="nano", PLAN="dead_zone:0.01,scope=token@layer.3", TARGET=target)
    assert done.returncode == 0, done.stderr
    asked = AQN.load(keys["+shaketable.aqn"].strip("'"))
    assert asked == AQN.load(f"epoch_aware:0.05-0.01+0.01-0.0005,form=output{layers},where=both")


def test_a_model_without_the_fault_is_not_guided(tmp_path):
    done, lines, _ = recipe("srdd_guided.sh", tmp_path, MODEL="nano", PLAN="gain:0@layer.3")
    assert done.returncode == 1 and "a located fault, is needed" in done.stderr
    assert "verl.trainer.main_ppo" not in lines


def test_each_experiment_and_seed_has_a_folder_of_its_own_and_a_repeated_command_finds_its_own_again(tmp_path):
    """verl resumes whatever lies in its folder: the second arm would go on from the first one's checkpoint."""
    asked = [
        ("baseline.sh", {}),
        ("baseline.sh", {"SEED": "1"}),
        ("baseline.sh", {"more": "+shaketable.aqn='global_decay:0.05-0.0005,stages=10,unit=absolute'"}),
        ("operator_noise.sh", {}),
        ("operator_noise.sh", {"PLAN": "relative_gaussian:0.05@op.all"}),
        ("operator_noise.sh", {"PLAN_IN": "rollout"}),
        ("aqn_epoch_aware.sh", {}),
        ("aqn_epoch_aware.sh", {"AQN": "global_decay:0.05-0.0005,stages=10"}),
    ]
    found = []
    for script, environment in [*asked, asked[0]]:
        more = [environment.pop("more")] if "more" in environment else []
        found.append(recipe(script, tmp_path, *more, **environment)[2]["trainer.default_local_dir"])
    assert len(set(found)) == len(asked)
    assert found[0] == found[-1]

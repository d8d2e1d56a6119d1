"""`shaketable run` of an unmodified training script on an accelerator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.shaken_device import DEVICE, on_device

pytestmark = on_device
PROGRAM = [sys.executable, str(Path(__file__).with_name("programs") / "device_loop.py"), DEVICE]
PLAN = "relative_gaussian:0.05@module.linear,phase=train;relative_gaussian:0.02@op.matmul,layers=1;dead_zone:0.05,scope=token@layer.0,phase=rollout"


def shake(folder, plan):
    words = [sys.executable, "-m", "shaketable", "run", "--plan", plan, "--seed", "3", "--ledger", str(folder), "--", *PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ)
    assert (folder / "ledger.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "ledger.json").read_text())


def test_an_unmodified_training_script_is_shaken(tmp_path):
    done, ledger = shake(tmp_path / "first", PLAN)
    assert done.returncode == 0, done.stdout + done.stderr
    modules, operators, rollout = ledger["sites"]
    assert modules["phases"] == {"train": {"forward": 5 * 14, "backward": 0}}
    assert 0 < modules["recomputed"] <= 5 * 14
    assert set(operators["layers"]) == {"1"}
    assert operators["phases"]["train"]["backward"] == 5 * 14
    assert rollout["phases"] == {"rollout": {"forward": 2, "backward": 0}}
    for site in (modules, operators):
        assert site["measured_magnitude"] == pytest.approx(site["asked"], rel=0.1)


def test_the_same_seed_is_the_same_program_and_a_plan_is_another(tmp_path):
    plan = "relative_gaussian:0.05@module.linear"
    printed = [shake(tmp_path / name, plan)[0].stdout.splitlines()[0] for name in ("first", "again")]
    clean = subprocess.run(PROGRAM, capture_output=True, text=True, timeout=300).stdout.splitlines()[0]
    assert printed[0] == printed[1] != clean


def test_nothing_injected_is_exit_3(tmp_path):
    done, _ = shake(tmp_path / "nothing", "gain:0@module.linear")
    assert done.returncode == 3

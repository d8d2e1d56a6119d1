"""The benchmark of training on a GPU runs: small, on a CPU, with all its arms, and one process of its campaign."""

import json
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "train_gpu.py"


@pytest.mark.slow
def test_it_measures_every_arm_and_writes_both_files(tmp_path):
    command = [sys.executable, str(SCRIPT), "--smoke", "--side-by-side", "1", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"]["plain TRL"]["ratio"] == 1 and len(found["steps"]) == 4
    for row in found["steps"].values():
        assert len(row["all_seconds"]) == 2
        assert row["seconds"] > 0 < row["sampling"] < row["seconds"] and 0 < row["loss"] < row["seconds"]
    shaken = found["steps"]["ours, plan in rollout and loss, and AQN"]["proof"]
    assert "plan: " in shaken and "aqn: " in shaken
    assert [row["processes"] for row in found["campaign"]] == [1] and found["campaign"][0]["steps_per_second"] > 0
    text = (tmp_path / "found.md").read_text()
    assert "| plain TRL |" in text and "runs side by side" in text

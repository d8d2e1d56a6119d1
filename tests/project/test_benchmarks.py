"""The benchmark of speed runs: small, on a CPU, with a few rows."""

import json
import subprocess
import sys

import pytest

from tests import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu_and_writes_what_was_asked_for(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--pairs", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "smollm2 first relative,alone,prefill eager naive"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert set(found) == {"smollm2-135m", "qwen2-1.5b"} and list(found["qwen2-1.5b"]) == ["prefill eager, naive hook"]
    score = found["smollm2-135m"]["score of 256 problems, alone"]
    assert score["fires"] > 0 and score["each"] == [score["ratio"]] and score["weights"] == "random weights"
    assert found["smollm2-135m"]["first pass eager, relative_gaussian on all linears"]["logits_moved"] > 0
    assert "| smollm2-135m | first pass eager, relative_gaussian on all linears |" in (tmp_path / "gpu.md").read_text()

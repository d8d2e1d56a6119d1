"""The benchmarks of speed run: small, on a CPU, with a few rows each, and they say which targets were missed."""

import json
import subprocess
import sys

import pytest

from tests import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


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


def test_lora_steps_are_proven_and_their_memory_is_the_computed_one(tmp_path, monkeypatch):
    import lora_7b

    options = ["--shape", "tiny", "--device", "cpu", "--tokens", "16", "--turns", "1", "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lora_7b.py", *options])
    lora_7b.main()
    facts = json.loads((tmp_path / "lora_7b.json").read_text(encoding="utf-8"))
    assert facts["trained"] == 2 * 16 * (9 * 64 + 2 * 32 + 3 * 128), "rank × (inputs + outputs), seven linears, two layers"
    assert facts["held_bytes"] == pytest.approx(facts["computed_held_bytes"], rel=0.01), "but for biases and norms"
    assert facts["proof"]["fires"] == 3 * 14 and facts["proof"]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)
    assert [row["peak_bytes"] for row in facts["rows"]] == [None, None], "a CPU does not tell"

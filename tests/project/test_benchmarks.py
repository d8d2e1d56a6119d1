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


def test_a_target_says_when_it_was_missed():
    from targets import Target

    assert Target(1.10).text(1.1004) == "≤ 1.10" and Target(1.10).text(1.102) == "≤ 1.10, missed"
    assert Target(0.85, at_least=True).text(0.9) == "≥ 0.85" and Target(0.85, at_least=True).text(0.4) == "≥ 0.85, missed"


def test_cases_are_chosen_by_all_words_of_an_alternative():
    from choice import Choice

    names = ["small first pass", "small decode", "large decode captured", "large first pass"]

    def chosen(only, without):
        return [name for name in names if Choice(only, without).has(name)]

    assert chosen([], []) == names
    assert chosen(["first,decode"], []) == names
    assert chosen(["large", "first,small", "decode"], []) == ["small decode", "large first pass"]
    assert chosen(["decode"], ["captured"]) == ["small decode"]


def test_first_passes_and_ten_with_opening_and_closing_are_told_apart(monkeypatch):
    import torch

    import shaketable as st
    from first_pass import PASSES, opened_rows
    from gpu_models import build

    model, seeds = build("smollm2-135m", "cpu", torch.float32, small=True), []
    own = st.inject
    monkeypatch.setattr("first_pass.st.inject", lambda m, plan, seed: (seeds.append((m, seed)), own(m, plan, seed=seed))[1])
    ids = torch.arange(32).view(2, 16)
    rows = opened_rows(model, "relative_gaussian:0.05@module.linear", lambda m: m(input_ids=ids).logits.detach(), 2)
    assert tuple(rows) == PASSES
    assert [seed for _, seed in seeds] == [10**6, 0, 1] and len({id(m) for m, _ in seeds} | {id(model)}) == 4
    for row in rows.values():
        assert row["ratio"] > 0 and row["low"] <= row["ratio"] <= row["high"] and row["logits_moved"] > 0
    assert len(rows[PASSES[2]]["each_pass"]) == 10


@pytest.mark.slow
def test_a_sweep_is_measured_beside_the_clean_one():
    from speed import sweep

    row = sweep(1)
    assert row["ratio"] > 0 and row["measured_error"] == pytest.approx(0.05, rel=0.1)
    assert (row["problems"], row["batch_size"]) == (200, 256)


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


@pytest.mark.gpu
def test_lora_steps_tell_their_peak_on_an_accelerator(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    subprocess.run([sys.executable, str(BENCHMARKS / "lora_7b.py"), "--shape", "tiny", "--out", str(tmp_path)], check=True)
    facts = json.loads((tmp_path / "lora_7b.json").read_text(encoding="utf-8"))
    assert all(row["peak_bytes"] >= facts["held_bytes"] for row in facts["rows"])


def test_7b_is_refused_on_a_cpu(monkeypatch, capsys):
    import lora_7b

    monkeypatch.setattr(sys, "argv", ["lora_7b.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        lora_7b.main()
    assert ended.value.code == 2 and "--shape tiny" in capsys.readouterr().err


def test_plain_torch_is_timed_beside_the_kernels(tmp_path):
    program = [sys.executable, str(BENCHMARKS / "plain_torch.py"), "--rounds", "2", "--turns", "1", "--out", str(tmp_path)]
    subprocess.run(program, check=True, capture_output=True)
    facts = json.loads((tmp_path / "plain_torch.json").read_text(encoding="utf-8"))
    noise = "relative_gaussian:0.05"
    assert facts["native"][noise]["operators"] < 5 < 100 < facts["torch"][noise]["operators"]
    assert f"| `{noise}` |" in (tmp_path / "plain_torch.md").read_text(encoding="utf-8")

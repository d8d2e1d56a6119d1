"""`shaketable run` on programs that never heard of Shaketable."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import slow
from tests.launch.under_run import LINEAR, PROGRAMS, TORCHRUN, program, under_plan
from tests.waiting import wait_until


def test_a_plain_loop_has_faults_forward(tmp_path):
    code, ledger, printed = under_plan(tmp_path / "l", LINEAR, *program("plain_loop.py"))
    assert code == 0, printed
    assert (ledger["forward"], ledger["backward"]) == (10, 0)
    assert ledger["sites"][0]["matched"] == 2
    assert ledger["sites"][0]["measured_error"] == pytest.approx(0.05, rel=0.2)
    assert ledger["sites"][0]["phases"] == {"train": {"forward": 10, "backward": 0}}


@pytest.mark.parametrize(
    ("plan", "command", "words"),
    [
        ("gian:1@op.matmul", ["true"], "did you mean 'gain'"),
        ("gain:1@op.matmul", ["no-such-program-here"], "cannot run 'no-such-program-here'"),
        ("missing.yaml", ["true"], "missing.yaml"),
        (LINEAR, ["true"], "another run"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, plan, command, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "ledger.json").write_text("{}")
    code, _, printed = under_plan(tmp_path / ("taken" if words == "another run" else "l"), plan, *command)
    assert code == 2
    assert words in printed
    assert len(printed.strip().splitlines()) == 1
    assert (tmp_path / "taken" / "ledger.json").read_text() == "{}", "nothing is overwritten"


@pytest.mark.parametrize(
    ("kind", "fires", "acted"), [("fork", 6, 3), slow("spawn", 6, 3), slow("loader", 6, 2), slow("threads", 12, 1)]
)
def test_workers_have_faults_and_write_their_own_ledger(tmp_path, kind, fires, acted):
    code, ledger, printed = under_plan(tmp_path / "l", LINEAR, *program("workers.py", kind))
    assert code == 0, printed
    assert ledger["forward"] == fires
    assert sum(1 for w in ledger["workers"] if w["forward"]) == acted


@pytest.mark.slow
def test_a_pool_ends_its_children_and_no_pass_is_lost(tmp_path):
    code, ledger, printed = under_plan(tmp_path / "l", LINEAR, *program("pool.py", "torch.multiprocessing", "spawn"))
    assert code == 0, printed
    assert ledger["forward"] == 20


@pytest.mark.slow
@pytest.mark.attack("full disks")
def test_a_ledger_that_cannot_be_written_stops_nobody_and_has_everything_when_it_can(tmp_path):
    code, ledger, printed = under_plan(tmp_path / "l", LINEAR, *program("pool.py", "multiprocessing", "fork", "away"))
    assert code == 0, printed
    assert "shaketable: cannot write" in printed and "Traceback" not in printed
    assert ledger["forward"] == 20


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "fires"), [(LINEAR, (6, 0)), slow("relative_gaussian:0.05@op.matmul", (9, 15))])
def test_compiled_programs_have_faults_wherever_their_models_are_met(tmp_path, plan, fires):
    code, ledger, printed = under_plan(tmp_path / "l", plan, *program("compiled.py"))
    assert code == 0, printed
    assert (ledger["forward"], ledger["backward"]) == fires


@pytest.mark.slow
def test_ranks_share_the_broken_lanes_and_not_the_noise(tmp_path):
    plan = "relative_gaussian:0.05,sparsity=0.5@op.matmul"
    code, ledger, printed = under_plan(tmp_path / "l", plan, *TORCHRUN, str(PROGRAMS / "ranks.py"))
    assert code == 0, printed
    acted = [w for w in ledger["workers"] if w["forward"]]
    assert sorted(w["rank"] for w in acted) == [0, 1]
    assert len({w["forward"] for w in acted}) == 1
    records = [json.loads(p.read_text()) for p in (tmp_path / "l").glob("process-*.json")]
    errors = [r["ledger"]["sites"][0]["measured_error"] for r in records if r["ledger"]["forward"]]
    shares = [r["ledger"]["sites"][0]["changed_fraction"] for r in records if r["ledger"]["forward"]]
    assert errors[0] != errors[1]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)


@pytest.mark.slow
def test_ray_workers_have_faults(tmp_path):
    code, ledger, printed = under_plan(tmp_path / "l", LINEAR, *program("ray_program.py"), env={"RAY_USAGE_STATS_ENABLED": "0"})
    assert code == 0, printed
    assert ledger["forward"] == 11
    assert sorted(w["forward"] for w in ledger["workers"] if w["forward"]) == [3, 8]


@pytest.mark.covers("Transformers", "`shaketable run` of a Trainer script", "eager")
@pytest.mark.slow
def test_a_hugging_face_trainer_has_faults(tmp_path):
    plan = "relative_gaussian:0.05@module.linear,phase=train;relative_gaussian:0.05@op.all,layers=1"
    code, ledger, printed = under_plan(tmp_path / "l", plan, *program("hf_trainer.py", str(tmp_path / "out")))
    assert code == 0, printed
    modules, operators = ledger["sites"]
    assert modules["matched"] == 14
    assert modules["phases"] == {"train": {"forward": 42, "backward": 0}}
    assert set(operators["layers"]) == {"1"}
    assert operators["backward"] > 0
    assert set(operators["phases"]) == {"train", "eval"}


@pytest.mark.covers("TRL", "`shaketable run` of a GRPO script", "eager")
@pytest.mark.slow
def test_trl_grpo_samples_in_rollout_and_learns_in_train(tmp_path):
    plan = "relative_gaussian:0.05@module.linear,phase=rollout;noise:0.01@layer.1"
    code, ledger, printed = under_plan(tmp_path / "l", plan, *program("trl_grpo.py", str(tmp_path / "out")))
    assert code == 0, printed
    rollout, layer = ledger["sites"]
    assert set(rollout["phases"]) == {"rollout"}
    assert rollout["forward"] > 0
    assert {"rollout", "train"} <= set(layer["phases"])


@pytest.mark.attack("kills")
def test_a_killed_process_keeps_its_ledger(tmp_path):
    body = "import signal, torch\nm = torch.nn.Linear(4, 4)\n[m(torch.ones(1, 4)) for _ in range(50)]\nprint('done', flush=True)\nsignal.pause()"
    folder = tmp_path / "l"
    words = [sys.executable, "-m", "shaketable", "run", "--plan", LINEAR, "--ledger", str(folder), "--"]
    runner = subprocess.Popen([*words, sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    assert runner.stdout.readline().strip() == "done"
    file = next(folder.glob("process-*.json"))
    wait_until(lambda: json.loads(file.read_text())["ledger"]["forward"] == 50, runner)
    os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
    assert runner.wait() == 128 + signal.SIGKILL
    assert json.loads((folder / "ledger.json").read_text())["forward"] == 50


def test_without_the_plan_python_starts_as_ever():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print([m for m in sys.modules if 'shaketable' in m])"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_command_itself_imports_no_torch():
    """It waits for a program and adds up what it wrote: seconds of every run, and a torch on a machine that need not have one."""
    code = "import sys, shaketable.launch.run, shaketable.ledger.table, shaketable.launch.ledger_file; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]

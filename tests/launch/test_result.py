"""What a run left behind, from processes made up so that no two of their numbers are alike."""

import json
import os
import signal
import sys

import pytest

from shaketable.errors import PlanError
from shaketable.launch import run
from shaketable.launch.inert_notices import Notices
from shaketable.launch.run import RunResult, collect, environment, new_folder
from shaketable.launch.unshaken_processes import called, unshaken
from shaketable.ledger.ledger import Ledger, SiteLedger
from shaketable.ledger.spot import Measured, Spot
from shaketable.plan import Plan

PLAN = "gain:0.5@layer.1"


def ledger(forward=0, backward=0, changed=0):
    sums = Measured(fires=1, values=1000, changed=changed, alive=1000)
    spot = Spot("a", 1, {"train": [forward, backward]} if forward + backward else {}, forward=sums)
    return Ledger(PLAN, 0, [SiteLedger("layer.1", "gain:0.5", 0.5, {"a": spot})])


def process(pid, forward=0, backward=0, changed=0, **more):
    told = {
        "pid": pid, "parent": pid - 1, "rank": pid % 7, "place": "", "actor": "", "forked": pid % 2 == 0, "started": float(pid),
        "command": f"program {pid}", "models": ["Net"], "late": [], "unmatched": [], "unmatched_models": [], "phases": ["train"],
        "distributed": None, "engine": False, "trained": True, "ledger": ledger(forward, backward, changed).to_dict(),
    }  # fmt: skip
    return told | more


def result(*processes, code=0, **more):
    merged = Ledger.merge([Ledger.from_dict(p["ledger"]) for p in processes]) if processes else None
    return RunResult(["python", "x.py"], code, None, merged, list(processes), **more)


def test_every_process_is_told_with_its_own_numbers_under_the_merged_ledger():
    one, two = process(11, 5, 3, 7), process(24, 2, 1, 9, place="rank 1", actor="actor", life=2)
    told = json.loads(json.dumps(result(one, two, code=4).to_dict()))
    shown = ("pid", "parent", "rank", "place", "actor", "forked", "command", "models")
    assert told["workers"] == [
        {k: one[k] for k in shown} | {"life": None, "forward": 5, "backward": 3},
        {k: two[k] for k in shown} | {"life": 2, "forward": 2, "backward": 1},
    ]
    assert (told["forward"], told["backward"], told["processes"], told["schema"]) == (7, 4, 2, "shaketable.ledger/1")
    assert (told["command"], told["program_exit"], told["exit"], told["warnings"]) == (["python", "x.py"], 4, 4, [])
    empty = result().to_dict()
    assert (
        empty["schema"] is None
        and empty["workers"] == []
        and empty["warnings"] == ["nothing was injected: no process of this command imported torch"]
    )


@pytest.mark.parametrize(
    ("code", "acts", "allowed", "exits"),
    [
        (0, True, False, 0),
        (0, False, False, 3),
        (0, False, True, 0),
        (5, False, False, 5),
        (-9, True, False, 137),
        (-9, False, True, 137),
    ],
)
def test_the_exit_code_is_the_programs_or_three(code, acts, allowed, exits):
    assert result(process(1, 5, 0, 7 if acts else 0), code=code, allow_inert=allowed).exit_code == exits
    assert result(code=code, allow_inert=allowed).exit_code == (
        exits if not acts else 0 if code == 0 and allowed else exits or 3
    )


def test_warnings_are_of_idle_processes_of_late_modules_and_of_inert_clauses_in_this_order():
    rest = process(1, phases=[], models=[])
    other = process(2, unmatched=["no layer 1", "more"], phases=["train"], distributed=None)
    late = process(3, 4, 0, 9, late=["a module came later", "and another"])
    lines = result(rest, other, late).warnings
    assert lines[0] == "process 2 (program 2) was not shaken, and others were: Net ran there, and no layer 1"
    assert lines[1] == "process 1 (program 1) imported torch but injected nothing (it called no model)"
    assert lines[2:] == ["process 3: a module came later", "process 3: and another"]
    assert result(process(1, 2, 0, 0)).warnings == ["gain:0.5@layer.1 fired 2 times and changed no value"]
    old = {k: v for k, v in process(5, unmatched=["why", "more"]).items() if k != "phases"}
    assert result(old, process(6, 1, 0, 1)).warnings == ["process 5 (program 5) imported torch but injected nothing (why)"]


def test_only_processes_that_should_have_been_shaken_are_named():
    """By the place in the list; nothing when none was shaken, nor of a process that says too little of itself."""
    idle, acts = process(2), process(3, 4, 0, 9)
    assert list(unshaken([acts, idle, acts])) == [1] and unshaken([idle, idle]) == {}
    assert unshaken([acts, {k: v for k, v in idle.items() if k != "phases"}]) == {}
    assert unshaken([acts, process(4, phases=["eval"], ledger=_in_phase("train"))]) == {}
    ranked = process(7, phases=[], distributed=[3, 8])
    assert unshaken([acts, ranked]) == {}, "the others are no ranks"
    line = unshaken([acts | {"distributed": [0, 8]}, ranked])[1]
    assert line == "rank 3 (process 7, program 7) was not shaken, and others were: no pass of a model was seen there"
    assert unshaken([acts | {"distributed": [0, 8]}, ranked | {"engine": True}]) == {}


def _in_phase(phase):
    told = ledger().to_dict()
    return told | {"plan": f"{PLAN},phase={phase}"}


def test_a_process_is_called_by_its_place_and_from_its_second_life_on_by_that_too():
    assert called(process(1)) == "program 1"
    assert called(process(1, place="worker 0")) == "worker 0" == called(process(1, place="worker 0", life=1))
    assert called(process(1, place="worker 0", life=2)) == "worker 0, life 2"


def test_what_processes_wrote_is_read_in_the_order_in_which_they_began_and_actors_live_on(tmp_path):
    for pid, started, actor in ((1, 30.0, "a"), (2, 10.0, "a"), (3, 20.0, "")):
        text = json.dumps(process(pid, 1, 0, 5, started=started, actor=actor))
        (tmp_path / f"process-{pid}.json").write_text(text)
    found = collect(tmp_path, ["x"], 0)
    assert [(p["pid"], p.get("life")) for p in found.processes] == [(2, 1), (3, None), (1, 2)]
    assert json.loads((tmp_path / "ledger.json").read_text()) == json.loads(json.dumps(found.to_dict()))
    assert found.ledger.forward == 3 and found.exit_code == 0


@pytest.mark.parametrize("name", ["ledger.json", "process-1.json"])
def test_a_folder_of_another_run_is_refused(tmp_path, name):
    new_folder(tmp_path / "deep" / "er")
    new_folder(tmp_path / "deep" / "er")
    (tmp_path / "deep" / "er" / name).write_text("{}")
    with pytest.raises(PlanError, match="holds the ledger of another run; name another folder, nothing is overwritten"):
        new_folder(tmp_path / "deep" / "er")


@pytest.mark.parametrize("path", [None, "/some/where"])
def test_a_plan_travels_in_four_variables_and_the_rest_stays(monkeypatch, tmp_path, path):
    monkeypatch.setenv("OTHER", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path:
        monkeypatch.setenv("PYTHONPATH", path)
    found = environment(Plan.parse(PLAN, seed=7), tmp_path)
    assert {k: v for k, v in found.items() if os.environ.get(k) != v} == {
        "SHAKETABLE_PLAN": PLAN,
        "SHAKETABLE_SEED": "7",
        "SHAKETABLE_LEDGER": str(tmp_path),
        "PYTHONPATH": str(run.STARTUP) + (f":{path}" if path else ""),
    }
    assert found["OTHER"] == "1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_go_to_the_program_and_afterwards_to_who_had_them_before(tmp_path, number):
    seen = []
    before = signal.signal(number, lambda *_: seen.append(1))
    try:
        code = f"import os, signal, time; os.kill(os.getppid(), {int(number)}); signal.pause()"
        assert run.run_command([sys.executable, "-S", "-c", code], dict(os.environ)) == -number
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [1], "who had it has it again"
    finally:
        signal.signal(number, before)


def test_every_notice_is_told_once_for_all_processes_and_each_by_itself(tmp_path, capfd):
    class Injection:
        plan = Plan.parse("gain:0.5@layer.1;gain:0.1@layer.2")

    ours, other = Notices(Injection(), tmp_path), Notices(Injection(), tmp_path)
    for what, line in ((0, "a"), (1, "b"), ((0, "Net"), "c"), ((1, "Net"), "d"), ((0, "Other"), "e")):
        for notices in (ours, other, ours):
            notices._tell(what, line)
    said = capfd.readouterr().err.splitlines()
    assert said == [f"shaketable: {line} (process {os.getpid()}; the program goes on)" for line in "abcde"]

"""What a run left behind: its exit code, its lines, its file, and who is said to have not been shaken."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from shaketable.errors import PlanError
from shaketable.launch import run
from shaketable.launch.run import RunResult, collect, new_folder, run_command, run_program
from shaketable.launch.unshaken_processes import unshaken
from shaketable.ledger.ledger import Ledger, SiteLedger
from shaketable.ledger.spot import Measured, Spot
from shaketable.plan import Plan

PLAN = "gain:0.5@layer.1"


def site(text, forward=0, backward=0, changed=0, alive=1000, values=1000):
    """What a clause did: fires, and what was measured at them."""
    fault, _, where = text.partition("@")
    sums = Measured(fires=1, values=values, changed=changed, alive=alive)
    measured = {"backward" if backward else "forward": sums} if forward + backward else {}
    spot = Spot("a", 1, {"train": [forward, backward]} if forward + backward else {}, **measured)
    return SiteLedger(where, fault, 0.5, {"a": spot})


def process(pid, *sites, **more):
    found = sites or (site(PLAN),)
    plan = ";".join(f"{s.fault}@{s.site}" for s in found)
    told = {
        "pid": pid, "parent": 1, "rank": 0, "place": "", "actor": "", "forked": False, "started": float(pid),
        "command": f"program {pid}", "models": ["Net"], "late": [], "unmatched": [], "unmatched_models": [], "phases": ["train"],
        "distributed": None, "engine": False, "trained": True, "ledger": Ledger(plan, 0, list(found)).to_dict(),
    }  # fmt: skip
    return told | more


def acts(pid=1, **more):
    return process(pid, site(PLAN, 4, changed=9), **more)


def result(*processes, code=0, **more):
    merged = Ledger.merge([Ledger.from_dict(p["ledger"]) for p in processes]) if processes else None
    return RunResult(["x"], code, None, merged, list(processes), **more)


# ---- exit codes and lines


@pytest.mark.parametrize(("code", "allowed", "exits"), [(0, False, 3), (0, True, 0), (4, False, 4), (-15, False, 143)])
def test_a_process_that_was_not_shaken_is_an_error_where_the_program_had_none(code, allowed, exits):
    found = result(acts(), process(2), code=code, allow_inert=allowed)
    assert found.exit_code == exits and list(found.unshaken) == [1]
    assert (found.to_dict()["program_exit"], found.to_dict()["exit"]) == (code, exits)


def test_a_program_without_a_ledger_is_an_error_unless_that_is_accepted():
    assert (result().exit_code, result(allow_inert=True).exit_code, result(code=-9).exit_code) == (3, 0, 137)


def test_a_process_that_fired_backward_alone_was_not_idle():
    assert result(process(1, site(PLAN, 0, 3, changed=5))).warnings == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"phases": []}, " (it called no model)"),
        ({"phases": [], "unmatched_models": [["Net", "eval"]]}, ""),
        ({"phases": ["eval"]}, ""),
        ({"phases": ["eval"], "unmatched": ["first", "second"]}, " (first)"),
        ({"phases": [], "unmatched": ["first"]}, " (it called no model)"),
        ({"phases": [], "place": "worker 3", "life": 2}, " (it called no model)"),
    ],
)
def test_a_process_that_was_idle_is_told_with_the_reason_if_there_is_one(more, why):
    named = "worker 3, life 2" if "place" in more else "program 2"
    line = f"process 2 ({named}) imported torch but injected nothing{why}"
    eval_only = process(2, **more)
    eval_only["ledger"]["plan"] = f"{PLAN},phase=train"
    assert run._idle(eval_only) == line


def test_lines_of_late_modules_name_their_process_and_inert_clauses_come_last():
    first, second = acts(5, late=["one", "two"]), process(6, site(PLAN, 2, changed=1), late=["three"])
    assert result(first, second).warnings == ["process 5: one", "process 5: two", "process 6: three"]
    inert = process(7, site(PLAN, 2), late=["four"])
    lines = result(inert).warnings
    assert lines[0] == "process 7: four" and lines[1:] == [f"{PLAN} fired 2 times and changed no value"]


def test_reasons_of_engines_are_in_what_is_written():
    told = result(acts(refused="no such layer"), acts(2, refused="no such layer"), acts(3)).to_dict()
    assert told["refused"] == ["no such layer"] and result(acts()).to_dict()["refused"] == []


# ---- files


def test_a_folder_with_other_files_is_taken(tmp_path):
    for name in ("told-1.mark", "process-1.txt", "process.json", "ledger.txt"):
        (tmp_path / name).write_text("")
    new_folder(tmp_path)


@pytest.mark.parametrize("allow", [False, True])
def test_a_program_is_run_with_its_plan_and_a_whole_path_and_what_it_leaves_is_collected(monkeypatch, tmp_path, allow):
    seen = {}

    def run_command(command, env):
        seen.update(env, command=command)
        (Path(env["SHAKETABLE_LEDGER"]) / "process-1.json").write_text(json.dumps(process(1, site(PLAN, 2))))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run_command", run_command)
    found = run_program(Plan.parse(PLAN, seed=9), ["a", "b"], Path("deep") / "l", allow_inert=allow)
    assert seen["command"] == ["a", "b"] == found.command and seen["SHAKETABLE_LEDGER"] == str(tmp_path / "deep" / "l")
    assert (seen["SHAKETABLE_PLAN"], seen["SHAKETABLE_SEED"]) == (PLAN, "9")
    assert found.exit_code == (0 if allow else 3) and found.allow_inert is allow and found.ledger.forward == 2
    assert json.loads((tmp_path / "deep" / "l" / "ledger.json").read_text())["forward"] == 2
    with pytest.raises(PlanError, match="holds the ledger of another run"):
        run_program(Plan.parse(PLAN), ["c"], Path("deep") / "l")
    assert seen["command"] == ["a", "b"], "the second one was not run"


def test_the_exit_of_a_program_is_in_what_is_collected(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "run_command", lambda command, env: -11)
    found = run_program(Plan.parse(PLAN), ["a"], tmp_path / "l")
    assert (found.program_exit, found.exit_code, found.ledger, found.processes) == (-11, 139, None, [])


def test_what_is_collected_is_written_for_people_with_an_end_of_line(tmp_path):
    (tmp_path / "process-1.json").write_text(json.dumps(acts()))
    (tmp_path / "process-2.json.draft").write_text('{"half of')
    found = collect(tmp_path, ["x", "y"], 6)
    text = (tmp_path / "ledger.json").read_text()
    assert text.endswith("}\n") and text.startswith('{\n  "')
    assert json.loads(text)["command"] == ["x", "y"] and (found.folder, found.program_exit) == (tmp_path, 6)
    again = collect(tmp_path, ["x", "y"], 6)
    assert again.ledger.forward == 4 and len(again.processes) == 1, "its own file is not one of a process"


def test_lives_are_counted_for_each_actor_in_the_order_of_their_beginning(tmp_path):
    for pid, actor in ((1, "a"), (2, "b"), (3, "a"), (4, ""), (5, "b"), (6, "a")):
        (tmp_path / f"process-{pid}.json").write_text(json.dumps(acts(pid, actor=actor, started=10.0 - pid, forked=pid == 6)))
    found = collect(tmp_path, [], 0)
    assert [(p["pid"], p.get("life")) for p in found.processes] == [(6, 1), (5, 1), (4, None), (3, 2), (2, 2), (1, 3)]
    assert [worker["life"] for worker in found.to_dict()["workers"]] == [1, 1, None, 2, 2, 3]


@pytest.mark.parametrize(
    ("error", "shown"), [(OSError(28, "No space left"), "No space left"), (OSError("something odd"), "something odd")]
)
def test_a_merged_ledger_that_cannot_be_written_names_the_file_the_reason_and_the_programs_exit(
    monkeypatch, tmp_path, error, shown
):
    def put_in_place(path, text):
        raise error

    monkeypatch.setattr(run, "put_in_place", put_in_place)
    with pytest.raises(PlanError) as raised:
        collect(tmp_path, [], 5)
    line = f"cannot write {tmp_path / 'ledger.json'}: {shown}; the program ended with 5"
    assert str(raised.value) == f"{line}, and what its processes wrote is in the folder"


# ---- the program itself


class Program:
    """A program that is interrupted before it ends."""

    def __init__(self, interrupts, code):
        self.interrupts, self.code, self.sent = interrupts, code, []

    def wait(self):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return self.code

    def send_signal(self, number):
        self.sent.append(number)


@pytest.mark.parametrize("interrupts", [0, 1, 3])
def test_an_interrupt_is_the_programs_and_its_own_end_is_waited_for(monkeypatch, interrupts):
    program, given = Program(interrupts, 7), {}
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, env: given.update(command=command, env=env) or program)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert run_command(["a", "b"], {"X": "1"}) == 7
    assert given == {"command": ["a", "b"], "env": {"X": "1"}} and program.interrupts == 0
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_under_its_own_number_and_handlers_come_back_after_an_error(monkeypatch, number):
    program, before = Program(0, 0), signal.getsignal(number)

    def wait():
        os.kill(os.getpid(), number)
        raise ZeroDivisionError

    program.wait = wait
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, env: program)
    with pytest.raises(ZeroDivisionError):
        run_command(["a"], {})
    assert program.sent == [number] and signal.getsignal(number) == before


def test_a_program_that_may_not_be_run_is_named(tmp_path):
    (tmp_path / "plain.txt").write_text("")
    with pytest.raises(PlanError, match=r"^cannot run '.*plain\.txt': Permission denied$"):
        run_command([str(tmp_path / "plain.txt"), "x"], dict(os.environ))


# ---- who was not shaken


@pytest.mark.parametrize(
    ("sites", "did"),
    [
        ([site(PLAN, 4, changed=9)], True),
        ([site(PLAN, 0, 4, changed=9)], True),
        ([site(PLAN)], False),
        ([site(PLAN, 4)], False),
        ([site(PLAN, 0, 4)], False),
        ([site(PLAN, 4, alive=0)], True),
        ([site(PLAN, 4, alive=255)], True),
        ([site(PLAN, 4, alive=256)], False),
        ([site(PLAN, 4), site("gain:0.1@layer.2", 2, changed=1)], True),
        ([site("gain:0.1@layer.2", 2, changed=1), site(PLAN, 4)], True),
        ([site(PLAN, 4), site("bit_flip:0.0001@layer.2", 2)], True),
        ([site("bit_flip:0.0001@layer.2", 2), site(PLAN, 4)], True),
        ([site("bit_flip:0.0001@layer.2"), site(PLAN, 4)], False),
        ([site(PLAN), site("gain:0.1@layer.2", 2, changed=1)], True),
    ],
)
def test_a_process_did_something_if_a_clause_changed_a_value_or_fired_too_rarely_to_tell(sites, did):
    assert (1 not in unshaken([acts(), process(2, *sites)])) is did
    assert (0 in unshaken([process(2), process(3, *sites)])) is did, "and then it is one of those who were shaken"


@pytest.mark.parametrize(
    ("plan", "more", "expected"),
    [
        ("gain:0@layer.1;gain:1@layer.2", {}, True),
        ("gain:1@layer.1,phase=eval;gain:1@layer.2,phase=train", {}, True),
        ("gain:1@layer.1,phase=eval;gain:1@layer.2,phase=rollout", {}, False),
        ("gain:1@layer.1,phase=eval+rollout", {"phases": ["train", "eval"]}, True),
        ("gain:1@layer.1,phase=eval", {"unmatched_models": [["Net", "eval"]]}, True),
        ("gain:1@layer.1,phase=eval", {"phases": [], "unmatched_models": [["Net", "train"]]}, False),
        ("gain:1@layer.1,direction=backward", {"trained": False}, False),
        ("gain:1@layer.1,direction=backward", {"trained": True}, True),
        ("gain:1@layer.1,direction=both", {"trained": False}, True),
        ("gain:0@layer.1;gain:0@layer.2", {}, False),
    ],
)
def test_a_process_should_have_been_shaken_if_one_clause_was_meant_for_it(plan, more, expected):
    idle = process(2, **more)
    idle["ledger"]["plan"] = plan
    assert (1 in unshaken([acts(), idle])) is expected


def test_lines_name_models_once_and_the_first_reason_alone():
    idle = process(2, unmatched=["first", "second"], models=["B", "A", "B"], unmatched_models=[["C", "train"], ["A", "eval"]])
    line = unshaken([acts(), idle])[1]
    assert line == "process 2 (program 2) was not shaken, and others were: B, A, C ran there, and first"
    assert unshaken([acts(), process(2)])[1].endswith(": Net ran there, and no clause changed a value")


def test_a_rank_is_named_by_its_number_and_a_worker_by_its_place_and_life():
    ranked = process(2, distributed=[5, 8], place="worker 1", life=3)
    assert unshaken([acts(), ranked])[1].startswith("rank 5 (process 2, worker 1, life 3) was not shaken, and others were: ")
    first = process(2, distributed=[0, 8])
    assert unshaken([acts(), first])[1].startswith("rank 0 (process 2, program 2) was")


def test_one_shaken_rank_is_enough_and_old_ledgers_of_others_are_read():
    idle, rank = process(3, phases=[], distributed=[1, 2]), acts(1, distributed=[0, 2])
    old = acts(2)
    del old["distributed"]
    assert list(unshaken([old, rank, idle])) == [2] and unshaken([old, idle]) == {}


def test_all_that_were_not_shaken_are_named_by_their_places_in_the_list():
    found = unshaken([process(1), acts(2), process(3), acts(4), process(5)])
    assert list(found) == [0, 2, 4] and [line.split(" (")[0] for line in found.values()] == [
        "process 1",
        "process 3",
        "process 5",
    ]


def test_unshaken_processes_are_looked_for_once():
    found = result(acts(), process(2))
    first = found.unshaken
    found.processes.append(SimpleNamespace())
    assert found.unshaken is first

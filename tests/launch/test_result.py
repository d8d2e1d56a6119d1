"""What a run left behind: exit code, lines, and files, from the ledgers of processes that were made up."""

import json
import os
import signal
import sys

import pytest

from shaketable.launch import run
from shaketable.launch.run import collect
from shaketable.ledger.ledger import Ledger, Measured, SiteLedger, Spot

PLAN = "gain:0.5@layer.1"


def site(text, forward=0, backward=0, changed=0, alive=1000):
    """What a clause did: fires, and what was measured at them."""
    fault, _, where = text.partition("@")
    sums = Measured(fires=1, values=1000, changed=changed, alive=alive)
    measured = {"backward" if backward else "forward": sums} if forward + backward else {}
    spot = Spot("a", 1, {"train": [forward, backward]} if forward + backward else {}, **measured)
    return SiteLedger(where, fault, 0.5, {"a": spot})


def process(pid, *sites, plan=None, **more):
    """The file of a process; without sites it did nothing."""
    found = sites or (site(PLAN),)
    body = {
        "schema": "shaketable.process/1", "pid": pid, "parent": 1, "rank": 0, "place": "", "actor": "", "forked": False,
        "started": float(pid), "command": f"program {pid}", "models": ["Net"], "late": [], "unmatched": [], "unmatched_models": [],
        "phases": ["train"], "distributed": None, "engine": False, "trained": True, "refused": None,
        "ledger": Ledger(";".join(f"{s.fault}@{s.site}" for s in found), 0, list(found)).to_dict(),
    }  # fmt: skip
    body["ledger"]["plan"] = plan or body["ledger"]["plan"]
    return body | more


def acts(pid=1, **more):
    return process(pid, site(PLAN, 4, changed=9), **more)


@pytest.fixture
def left(tmp_path):
    """Collects the processes that a program left behind."""

    def left(*processes, code=0, allow_inert=False):
        for file in tmp_path.iterdir():
            file.unlink()
        for body in processes:
            (tmp_path / f"process-{body['pid']}.json").write_text(json.dumps(body))
        found = collect(tmp_path, ["python", "x.py"], code, allow_inert=allow_inert)
        assert json.loads((tmp_path / "ledger.json").read_text()) == json.loads(json.dumps(found.to_dict()))
        return found

    return left


# ---- exit codes and lines


@pytest.mark.parametrize(
    ("code", "allowed", "good", "bad"), [(0, False, 0, 3), (0, True, 0, 0), (5, False, 5, 5), (-9, False, 137, 137)]
)
def test_the_exit_code_is_that_of_the_program_or_three(left, code, allowed, good, bad):
    for processes, expected in (
        ([acts()], good),
        ([process(1, site(PLAN, 0, 3, changed=5))], good),
        ([process(1)], bad),
        ([process(1, site(PLAN, 4))], bad),
        ([acts(), process(2)], bad),
        ([], bad),
    ):
        found = left(*processes, code=code, allow_inert=allowed)
        assert (found.exit_code, found.to_dict()["exit"], found.to_dict()["program_exit"]) == (expected, expected, code)


def test_lines_are_of_processes_without_the_plan_of_idle_ones_of_late_modules_and_of_inert_clauses(left):
    assert left().warnings == ["nothing was injected: no process of this command imported torch"]
    other, late = process(2, unmatched=["no layer 1", "more"]), acts(3, late=["a module came later", "and another"])
    assert left(process(1, phases=[]), other, late).warnings == [
        "process 2 (program 2) ran without the plan, and others under it: Net ran there, and no layer 1",
        "process 1 (program 1) imported torch but injected nothing (it called no model)",
        "process 3: a module came later",
        "process 3: and another",
    ]
    assert left(process(1, site(PLAN, 2))).warnings == [f"{PLAN} fired 2 times and changed no value"]


# ---- processes without the plan


@pytest.mark.parametrize(
    ("sites", "did"),
    [
        ([site(PLAN, 4, changed=9)], True),
        ([site(PLAN, 4)], False),
        ([site(PLAN, 4, alive=255)], True),
        ([site(PLAN, 4, alive=256)], False),
        ([site("bit_flip:0.0001@layer.1", 2)], True),
    ],
)
def test_a_process_did_something_if_a_clause_changed_a_value_or_fired_too_rarely_to_tell(left, sites, did):
    plan = f"{sites[0].fault}@{sites[0].site}"
    good = process(1, site(plan, 4, changed=9))
    assert list(left(good, process(2, *sites)).without_plan) == ([] if did else [1])


@pytest.mark.parametrize(
    ("plan", "more", "said"),
    [
        (PLAN, {}, "Net ran there, and no clause changed a value"),
        (PLAN, {"models": ["B", "A", "B"], "unmatched_models": [["C", "train"]]}, "B, A, C ran there"),
        (PLAN, {"phases": []}, None),
        (f"{PLAN},phase=eval", {}, None),
        (f"{PLAN},direction=backward", {"trained": False}, None),
        (f"{PLAN},direction=backward", {"trained": True}, "Net ran there"),
    ],
)
def test_a_process_is_named_if_the_plan_was_meant_for_it(left, plan, more, said):
    found = left(acts(plan=plan), process(2, plan=plan, **more)).without_plan
    assert said in found[1] if said else not found
    assert not left(process(2, plan=plan, **more)).without_plan, "where it acted nowhere, the plan as a whole is inert"


@pytest.mark.parametrize(
    ("rank", "others", "engine", "named"),
    [((1, 2), (0, 2), False, True), ((1, 2), None, False, False), ((1, 2), (0, 2), True, False), (None, (0, 2), False, False)],
)
def test_a_rank_without_a_pass_is_named_unless_it_serves(left, rank, others, engine, named):
    idle = process(3, phases=[], distributed=rank, engine=engine, place="worker 1", actor="a")
    found = left(acts(1, actor="a"), acts(2, distributed=others), idle).without_plan
    line = "rank 1 (process 3, worker 1, life 2) ran without the plan, and others under it: no pass of a model was seen there"
    assert found == ({2: line} if named else {})


# ---- files


def test_processes_are_merged_in_the_order_in_which_they_began_and_lives_of_actors_counted(left):
    bodies = [acts(pid, actor=actor, started=10.0 - pid) for pid, actor in ((1, "a"), (2, "b"), (3, "a"), (4, ""), (6, "a"))]
    found = left(*bodies, code=6)
    told = found.to_dict()
    assert [(row["pid"], row["life"], row["forward"]) for row in told["workers"]] == [
        (6, 1, 4), (4, None, 4), (3, 2, 4), (2, 1, 4), (1, 3, 4),
    ]  # fmt: skip
    assert (told["forward"], told["processes"], told["command"]) == (20, 5, ["python", "x.py"])
    again = collect(found.folder, ["x"], 6)
    assert again.ledger.forward == 20, "its own file is not one of a process"


# ---- the program itself


def test_signals_go_to_the_program_and_afterwards_to_who_had_them_before():
    number, seen = signal.SIGTERM, []
    before = signal.signal(number, lambda *_: seen.append(1))
    try:
        code = f"import os, signal, time; os.kill(os.getppid(), {int(number)}); signal.pause()"
        assert run.run_command([sys.executable, "-S", "-c", code], dict(os.environ)) == -number
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [1], "who had it has it again"
    finally:
        signal.signal(number, before)


def test_a_python_without_the_package_is_left_at_once(tmp_path):
    (tmp_path / "shaketable").mkdir()
    (tmp_path / "shaketable" / "__init__.py").write_text("raise ImportError('no pydantic here')")
    variables = {"SHAKETABLE_PLAN": PLAN, "PYTHONPATH": f"{run.STARTUP}:{tmp_path}"}
    done = run.subprocess.run(
        [sys.executable, "-c", "print('went on')"], env=os.environ | variables, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shaketable: cannot inject into {sys.executable}: no pydantic here. Install shaketable there.\n"

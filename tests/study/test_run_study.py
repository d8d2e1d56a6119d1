"""Studies as they are run: undisturbed, killed at random moments, by two processes at once, with runs that crash.

The measure of all is a study done run by run in this process: whatever happens to the others, their findings are its own.
"""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.run_cell import do
from shaketable.study.store import define, progress
from tests.study.small_studies import data, findings, study
from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "shaketable", "study", "run"]
TIMES = ("cost",)


def numbers(found):
    """Findings without the clock and the identity of runs."""
    arms = [{k: v for k, v in arm.items() if k not in TIMES} for arm in found["arms"]]
    for arm in arms:  # sums are added in another order after a kill
        arm["proof"] = [{k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()} for row in arm["proof"]]
    rest = {k: found[k] for k in ("complete", "verdict", "comparisons", "diagnoses", "notes")}
    study = {k: v for k, v in found["study"].items() if k != "digest"}  # records have times in them
    return json.loads(json.dumps({"arms": arms, "study": study, **rest}))


def by_hand(asked, store):
    torch.set_num_threads(1)
    define(asked, store)
    for cell in cells_of(asked):
        assert do(cell, asked.study, store / asked.study / "runs", "test") == "done"
    return findings(asked, store / asked.study)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return by_hand(study(), tmp_path_factory.mktemp("undisturbed"))


def file_of(folder, **replaced):
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data(**replaced), sort_keys=False))
    return path


def start(file, store, *words):
    command = [*COMMAND, str(file), "--store", str(store), "--json", str(store) + ".json", "--force", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finished(process, code=0):
    out = process.communicate(timeout=300)[0]
    assert process.returncode == code, out
    return out


def written(store):
    """Bytes in the records so far."""
    return sum(path.stat().st_size for path in store.glob(f"small/runs/*/{FILE}"))


@pytest.mark.slow
@pytest.mark.attack("kills")
def test_a_study_killed_three_times_ends_as_if_nothing_had_happened(undisturbed, tmp_path):
    file, store, chance = file_of(tmp_path), tmp_path / "store", random.Random(20261118)
    whole = 60_000
    marks = sorted(chance.sample(range(whole), 3))
    print("killed when the records have", marks, "bytes")  # shown when the test fails
    for mark, how in zip(marks, chance.sample([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 3), strict=True):
        process = start(file, store, "--workers", "1")
        wait_until(lambda mark=mark, process=process: written(store) >= mark or process.poll() is not None)
        process.send_signal(how)
        process.communicate()
    out = finished(start(file, store))
    assert "Not shown" in out or "Shown" in out
    found = findings(study(), store / "small")
    assert numbers(found) == numbers(undisturbed)
    assert numbers(json.loads((tmp_path / "store.json").read_text()))["arms"] == numbers(undisturbed)["arms"]
    assert all(run["status"] == "done" for run in found["runs"])


@pytest.mark.slow
@pytest.mark.attack("two processes on one study")
def test_two_processes_share_a_study(undisturbed, tmp_path):
    file, store = file_of(tmp_path), tmp_path / "store"
    both = [start(file, store, "--workers", "1") for _ in range(2)]
    for process in both:
        finished(process)
    found = findings(study(), store / "small")
    assert numbers(found) == numbers(undisturbed)
    assert [run["attempts"] for run in found["runs"]] == [1] * 9, "no run was done twice"
    pids = {e["pid"] for r in (store / "small" / "runs").glob("[!.]*/") for e in RunRecord.open(r).events("attempt")}
    assert len(pids) == 2, "both of them worked"


CRASHING = """
import os, signal
from pathlib import Path
from shaketable.evaluate.tasks import Arithmetic


class Crashing(Arithmetic):
    name = "crashing"

    def prompt(self, problem, *, chat):
        if Path("{folder}/once").exists():
            Path("{folder}/once").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prompt(problem, chat=chat)
"""


def crashing(folder):
    """A task that takes its process down once, when a file says so."""
    (folder / "tasks.py").write_text(CRASHING.replace("{folder}", str(folder)))
    return f"{folder}/tasks.py:Crashing"


@pytest.mark.slow
@pytest.mark.attack("kills")
def test_a_run_that_crashes_is_tried_again_and_does_not_stop_the_others(tmp_path):
    (tmp_path / "once").touch()
    arms = {
        "one": {"task": crashing(tmp_path)},
        "other": {"plan": "noise"},
        "wrong": {"overrides": {"lr": 1e30}, "plan": "noise"},
    }
    compare = {"primary": {"a": "one", "b": "other", "endpoint": "seconds_per_step"}}
    asked = data(arms=arms, compare=compare, seeds=1)
    store = tmp_path / "store"
    out = finished(
        start(file_of(tmp_path, arms=arms, compare=compare, seeds=1), store, "--workers", "1", "--allow-code"), code=1
    )
    runs = {r["arm"]: r for r in progress(study(**asked), store / "small")["runs"]}
    assert runs["one"]["status"] == runs["other"]["status"] == "done"
    assert runs["wrong"]["status"] == "failed" and "no longer finite" in runs["wrong"]["error"]
    assert runs["wrong"]["attempts"] == 1, "what would fail again is not tried again"
    record = RunRecord.open(next((store / "small" / "runs").glob("one-*")))
    assert [e["number"] for e in record.events("attempt")] == [1, 2]
    [death] = record.events("failed")
    assert death["exit"] == -9 and "died with exit status -9" in death["error"]
    assert "tries again" in out or "died with exit status -9" in out


@pytest.mark.attack("kills")
@pytest.mark.slow
def test_a_worker_does_not_outlive_its_parent(tmp_path):
    """kill -9 of the parent: the worker sees it by itself, and its run is left as partial and not as failed."""
    file, store = file_of(tmp_path, train=data()["train"] | {"steps": 400}), tmp_path / "store"
    process = start(file, store, "--workers", "1")
    pattern = f"small/runs/*/{FILE}"
    wait_until(lambda: any(b'"event": "step"' in path.read_bytes() for path in store.glob(pattern)), process)  # in a training
    pids = {e["pid"] for r in (store / "small" / "runs").glob("[!.]*/") for e in RunRecord.open(r).events("attempt")}
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(_is_alive(pid) for pid in pids))
    states = {r["status"] for r in progress(study(train=data()["train"] | {"steps": 400}), store / "small")["runs"]}
    assert states <= {"done", "partial", "missing"} and "partial" in states


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.attack("tampered records")
def test_a_damaged_record_is_named_and_left_alone(tmp_path):
    asked = study(arms={"as it comes": {"train": False}}, compare={}, seeds=2)
    by_hand(asked, tmp_path)
    broken = sorted((tmp_path / "small" / "runs").glob("as-it-comes-s1-*"))[0] / FILE
    text = broken.read_text()
    broken.write_text(text.replace('"correct": false', '"correct": true ', 1))  # one wrong answer made right
    before = broken.read_bytes()
    found = findings(asked, tmp_path / "small")
    assert [r["status"] for r in found["runs"]] == ["done", "damaged"]
    assert not found["complete"]
    assert f"{broken} was changed at line" in found["notes"][0]
    assert found["arms"][0]["seeds"] == [0], "none of it is believed"
    with pytest.raises(Exception, match="was changed at line"):
        do(cells_of(asked)[1], "small", tmp_path / "small" / "runs", "test")
    assert broken.read_bytes() == before


@pytest.mark.attack("kills")
def test_a_run_that_was_scored_and_then_killed_still_reads_its_mechanism(tmp_path):
    evaluate = data()["evaluate"] | {"mechanism": True}
    asked = study(arms={"as it comes": {"train": False}}, compare={}, seeds=1, evaluate=evaluate)
    by_hand(asked, tmp_path)
    [cell] = cells_of(asked)
    folder = tmp_path / "small" / "runs" / cell.name
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    kept = next(i for i, line in enumerate(lines) if '"event": "evaluation"' in line)
    (folder / FILE).write_text("".join(lines[: kept + 1]))
    (folder / SEAL).unlink()
    do(cell, "small", tmp_path / "small" / "runs", "test")
    assert len(RunRecord.open(folder).events("mechanism")) == len(RunRecord.open(folder).events("examples")) == 1


@pytest.mark.attack("tampered records")
def test_a_sealed_run_whose_record_is_lost_is_not_thrown_away(tmp_path):
    asked = study(arms={"as it comes": {"train": False}}, compare={}, seeds=1)
    by_hand(asked, tmp_path)
    [cell] = cells_of(asked)
    folder = tmp_path / "small" / "runs" / cell.name
    (folder / FILE).unlink()
    with pytest.raises(ShaketableError, match="it has no record"):
        do(cell, "small", tmp_path / "small" / "runs", "test")
    assert (folder / SEAL).is_file()
    assert findings(asked, tmp_path / "small")["runs"][0]["status"] == "damaged"

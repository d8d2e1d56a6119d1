"""Records, definitions and runs on a disk that is full, read-only, or taken away with its process, at every use of it in turn."""

import os
import signal

import pytest
import torch

from shaketable.cli.outputs import write
from shaketable.errors import ShaketableError
from shaketable.records.record import FILE, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.file import parse_study
from shaketable.study.run_cell import do
from shaketable.study.store import define, definitions, described, summaries
from shaketable.train import checkpoints
from tests.faulty_disk import FaultyDisk, every_use, full, killed, read_only
from tests.study.small_studies import data

DISKS = pytest.mark.parametrize(
    "fails",
    [
        pytest.param(full, marks=pytest.mark.attack("full disks")),
        pytest.param(read_only, marks=pytest.mark.attack("read-only folders")),
    ],
)
FULL, KILLS = pytest.mark.attack("full disks"), pytest.mark.attack("kills")


def assert_one_line(error):
    assert isinstance(error, ShaketableError), repr(error)
    assert "\n" not in str(error)
    assert any(os.strerror(number) in str(error) for number in (28, 30)), error


def folder_in(tmp_path):
    def made(at):
        (tmp_path / f"{at}").mkdir()
        return tmp_path / f"{at}"

    return made


def write_record(folder, told):
    record = RunRecord.create(folder / "run", "train", {"steps": 2}, {})
    for step in (1, 2):
        record.append("step", step=step, text="é" * 100)
        told.append(step)
    record.append("finished", step=2)


@DISKS
def test_a_record_has_all_that_was_told_and_goes_on_when_there_is_room(tmp_path, monkeypatch, fails):
    told = []

    def act(folder):
        told.clear()
        write_record(folder, told)

    for _, folder, error in every_use(monkeypatch, folder_in(tmp_path), act, fails):
        assert_one_line(error)
        if not (folder / "run" / FILE).exists() or not (folder / "run" / FILE).read_bytes():
            assert told == []
            continue
        record = RunRecord.open(folder / "run", "train")
        assert [e["step"] for e in record.events("step")] == told
        if not record.events("finished"):
            for step in {1, 2} - set(told):
                record.append("step", step=step)
            record.append("finished", step=2)
        record.seal()
        assert record.sealed()["lines"] == 4
        assert not list((folder / "run").glob(".record.seal.*"))


@DISKS
def test_a_file_that_cannot_be_written_keeps_what_it_was(tmp_path, monkeypatch, fails):
    def folder_of(at):
        folder = folder_in(tmp_path)(at)
        (folder / "out.json").write_text("old")
        return folder

    for _, folder, error in every_use(monkeypatch, folder_of, lambda folder: write(folder / "out.json", "new"), fails):
        assert_one_line(error)
        assert [path.name for path in folder.iterdir()] == ["out.json"]
        assert (folder / "out.json").read_text() == "old"


@FULL
def test_a_checkpoint_that_could_not_be_sealed_is_none(tmp_path, monkeypatch):
    def folder_of(at):
        folder = tmp_path / f"{at}" / "checkpoint-1"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * 100)
        return folder

    def act(folder):
        with checkpoints.writing("checkpoint-1", folder.parent):
            checkpoints.seal(folder, {"ledgers": {}})

    for _, folder, error in every_use(monkeypatch, folder_of, act):
        assert_one_line(error)
        assert checkpoints.sealed(folder.parent) == []


# ---- studies

ARMS = {"as it comes": {"train": False}}
COMPARE = {"primary": None, "against": None}


def small(**more):
    conditions = {"noise": "relative_gaussian:0.2@op.matmul"}
    evaluate = {"n": 2, "mechanism": False, "conditions": conditions}
    return parse_study(data(arms=ARMS, seeds=1, evaluate=evaluate, compare=COMPARE) | more)


def asked_twice(store):
    define(small(question="first?"), store)
    define(small(question="second?"), store)


@DISKS
def test_a_study_is_defined_when_there_is_room_again(tmp_path, monkeypatch, fails):
    for at, store, error in every_use(monkeypatch, folder_in(tmp_path), asked_twice, fails):
        assert_one_line(error)
        asked_twice(store)
        assert definitions(store / "small")[-1]["config"] == described(small(question="second?")), at


def in_a_child(act):
    """Do something in a process of its own; the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return -code


def killed_at(at, store, act, monkeypatch):
    def doomed():
        with FaultyDisk(store, at, killed).working(monkeypatch):
            act(store)

    return in_a_child(doomed)


@KILLS
def test_a_study_whose_definition_was_killed_at_any_use_of_the_disk_is_defined(tmp_path, monkeypatch):
    for at in range(1, 100):
        store = folder_in(tmp_path)(at)
        if not killed_at(at, store, asked_twice, monkeypatch):
            break
        asked_twice(store)
        assert definitions(store / "small")[-1]["config"] == described(small(question="second?")), at
    assert at > 8


def answers(store):
    (cell,) = cells_of(small())
    found = RunRecord.open(store / "small" / "runs" / cell.name).events("evaluation")
    return [(c["name"], [a["text"] for a in c["answers"]]) for e in found for c in e["conditions"]]


def scored(store):
    for cell in cells_of(small()):
        assert do(cell, "small", store / "small" / "runs", "test") == "done"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("undisturbed")
    scored(store)
    assert len(answers(store)) == 2
    return answers(store)


@FULL
def test_a_run_of_a_study_ends_the_same_when_there_is_room_again(undisturbed, tmp_path, monkeypatch):
    for at, store, error in every_use(monkeypatch, folder_in(tmp_path), scored):
        assert_one_line(error)
        assert all(s.status in ("partial", "failed", "done") for s in summaries(store)), at
        scored(store)
        assert answers(store) == undisturbed
        assert [s.status for s in summaries(store)] == ["done"]


@pytest.mark.slow
@KILLS
def test_a_run_of_a_study_killed_at_any_use_of_the_disk_ends_the_same(undisturbed, tmp_path, monkeypatch):
    for at in range(1, 100):
        store = folder_in(tmp_path)(at)
        if not killed_at(at, store, scored, monkeypatch):
            break
        assert all(s.status in ("partial", "done") for s in summaries(store)), at
        scored(store)
        assert answers(store) == undisturbed
        assert [s.status for s in summaries(store)] == ["done"]
    assert at > 8

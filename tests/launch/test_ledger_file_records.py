"""What the file of a process says: of a fork, of training, and what is told while the program runs."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.launch import ledger_file, process_identity
from shaketable.launch.inert_notices import Notices
from shaketable.launch.ledger_file import LedgerFile
from shaketable.launch.process import ProcessInjection
from shaketable.launch.process_identity import Place
from shaketable.plan import Plan

BACKWARD = "gain:0.5@module.linear,direction=backward"


@pytest.fixture
def process(tmp_path):
    injection = ProcessInjection(Plan.parse("gain:0.5@module.linear"))
    injection.enable()
    yield injection, LedgerFile(injection, tmp_path)
    injection.close(check=False)


def called(injection):
    model = nn.Sequential(nn.Linear(4, 4))
    injection.meet(model)
    model(torch.ones(2, 4))
    return model


def test_a_child_has_made_no_pass_when_it_is_forked(process):
    injection, file = process
    called(injection).eval()
    assert file._record()["phases"] == ["train"] and file._record()["ledger"]["forward"] == 1
    file.after_fork()
    assert file._record()["phases"] == [] and file._record()["ledger"]["forward"] == 0
    assert file._record()["forked"]


def test_a_process_that_trained_says_so(process, tmp_path):
    injection, file = process
    assert not file._record()["trained"]
    injection.notices = Notices(injection, tmp_path)
    assert not file._record()["trained"]
    injection.notices.trained = True
    assert file._record()["trained"]


def test_a_clause_that_matched_in_an_earlier_model_is_not_told_of_a_later_one(tmp_path, capfd):
    plan = Plan.parse("gain:0.5@module.first;gain:0.5@module.second;gain:0.5@module.third")
    notices = Notices(SimpleNamespace(plan=plan, roots=[]), tmp_path)
    model = nn.Sequential(nn.Linear(2, 2))
    notices.on_model(model, {1: "no second", 2: "no third"})
    capfd.readouterr()
    notices.on_model(nn.ModuleList(model), {0: "no first", 1: "no second"})
    said = capfd.readouterr().err
    assert "module.second does nothing in ModuleList: no second" in said and "module.first" not in said


def test_a_record_says_all_that_is_known_of_a_process_each_in_its_place(process, monkeypatch):
    injection, file = process
    monkeypatch.setattr(sys, "argv", ["/some/where/program.py", "--a", "b" * 80])
    called(injection)
    injection.late |= {"z", "a"}
    injection.unmatched += [f"line {i % 9}" for i in range(20)]
    injection.unmatched_models |= {("Other", "eval"), ("Net", "train")}
    found = file._record()
    assert (found["schema"], found["pid"], found["parent"]) == ("shaketable.process/1", os.getpid(), os.getppid())
    assert (found["rank"], found["forked"], found["engine"], found["trained"]) == (injection.rank, False, False, False)
    assert found["command"] == ("program.py --a " + "b" * 80)[:60] and found["started"] == file.started
    assert found["models"] == ["Sequential"] and found["late"] == ["a", "z"] and found["phases"] == ["train"]
    assert found["unmatched"] == [f"line {i}" for i in range(8)]
    assert found["unmatched_models"] == [("Net", "train"), ("Other", "eval")]
    assert found["ledger"] == injection.ledger.to_dict() | {"processes": 1} and found["distributed"] is None


def test_a_fork_forgets_all_that_its_parent_did(process, tmp_path, monkeypatch):
    injection, file = process
    injection.notices = Notices(injection, tmp_path)
    called(injection)
    injection.notices.trained, file.distributed = True, (3, 8)
    injection.unmatched_models.add(("Net", "train"))
    file.engines.append(("Engine", injection))
    before, began = file._file, file.started
    file.after_fork()
    found = file._record()
    assert (found["forked"], found["trained"], found["distributed"], found["engine"]) == (True, False, None, False)
    assert (found["unmatched_models"], found["phases"], found["ledger"]["forward"]) == ([], [], 0)
    assert file._file is not before and file._file.path != before.path and file.started >= began


@pytest.mark.parametrize(
    "change",
    [
        lambda injection, file: called(injection),
        lambda injection, file: injection.late.add("x"),
        lambda injection, file: injection.unmatched.append("x"),
        lambda injection, file: injection.unmatched_models.add(("x", "train")),
        lambda injection, file: setattr(file, "distributed", (0, 2)),
        lambda injection, file: injection.names.append("Net"),
        lambda injection, file: setattr(injection, "notices", SimpleNamespace(trained=True)),
        lambda injection, file: injection.inert_check.phases.update(["eval"]),
    ],
    ids=["a fire", "late", "unmatched", "another model", "a rank", "a model", "training", "a pass"],
)
def test_whatever_is_told_is_news_and_nothing_else_is(process, change):
    injection, file = process
    before = file._news()
    assert file._news() == before
    change(injection, file)
    assert file._news() != before
    injection.notices = None


def test_only_what_is_new_is_written_when_a_process_catches_up(process, monkeypatch):
    injection, file = process
    written = []
    monkeypatch.setattr(file._file, "try_flush", lambda: written.append(1))
    file._file._seen = file._news()
    file.catch_up()
    assert written == [], "nothing was done since the last time"
    called(injection)
    file.catch_up()
    assert written == [1]
    monkeypatch.setattr(injection.tables, "all", [object()])
    file._file._seen = file._news()
    file.catch_up()
    assert written == [1, 1], "on a GPU one has to look"


@pytest.mark.parametrize(
    ("rank", "joined", "inherited"), [(r, j, i) for r in (False, True) for j in (False, True) for i in (False, True)]
)
def test_a_rank_is_a_process_that_a_launcher_started_and_that_joined_a_group_of_its_own(
    process, monkeypatch, rank, joined, inherited
):
    _, file = process
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", "3")
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: joined, get_rank=lambda: 3, get_world_size=lambda: 8
    )
    monkeypatch.setattr(ledger_file, "dist", group)
    file._inherited = inherited
    expected = (3, 8) if rank and joined and not inherited else None
    assert file.note_rank() == expected == file.distributed
    group.is_initialized = lambda: False
    assert file.note_rank() == expected, "also when it has left it since"


@pytest.mark.parametrize("forked", [False, True])
def test_whatever_is_written_is_looked_at_first_in_a_fork_too(process, monkeypatch, forked):
    injection, file = process
    seen = []
    injection.notices = SimpleNamespace(trained=False, look=seen.append, after_fork=lambda: None)
    if forked:
        file.after_fork()
    seen.clear()
    file._record()
    assert seen == [injection.ledger.sites]
    injection.notices = None


def test_what_engines_of_a_process_did_is_in_its_ledger_and_their_models_are_named(process):
    injection, file = process
    called(injection)
    other = ProcessInjection(Plan.parse("gain:0.5@module.linear"))
    other.enable()
    called(other)
    called(other)
    file.engines.append(("Engine", other, other.ledger))
    try:
        found = file._record()
        assert found["ledger"]["forward"] == 3 and found["ledger"]["processes"] == 1 and found["engine"] is True
        assert found["models"] == ["Sequential", "Engine"] and file._passes()["train"] == 3
        assert file._news()[0] == injection.fires + other.fires and file._injections() == [injection, other]
    finally:
        other.close(check=False)


def test_an_engine_that_cannot_do_what_the_plan_says_is_news_and_is_told(process):
    _, file = process
    before = file._news()
    file.refused = "no such layer"
    assert file._news() != before and file._record()["refused"] == "no such layer"


def test_a_place_that_was_known_once_is_kept_and_a_fork_is_a_child_of_it(process, monkeypatch):
    _, file = process
    places = [Place("driver", "id"), Place()]
    monkeypatch.setattr(process_identity, "current_place", lambda: places[0])
    assert (file._record()["place"], file._record()["actor"]) == ("driver", "id")
    places.reverse()
    assert file._record()["place"] == "driver", "it has left its cluster"
    file.after_fork()
    assert (file._record()["place"], file._record()["actor"]) == ("child of driver", "")


def test_passes_are_news_at_powers_of_two_and_a_program_without_a_name_is_python(process, monkeypatch):
    injection, file = process
    seen = []
    for _ in range(9):
        injection.inert_check.phases.update(["eval"])
        seen.append(file._news())
    assert [n + 1 for n in range(9) if n == 0 or seen[n] != seen[n - 1]] == [1, 2, 4, 8]
    monkeypatch.setattr(sys, "argv", [])
    assert file._record()["command"] == "python"
    monkeypatch.setattr(sys, "argv", ["/a/b.py", "c"])
    assert file._record()["command"] == "b.py c"


def test_every_process_has_a_file_of_its_own_and_a_folder_that_cannot_be_written_to_stops_it(process, tmp_path):
    _, file = process
    first = file._file.path
    assert first.parent == tmp_path and first.name.startswith(f"process-{os.getpid()}-") and first.suffix == ".json"
    file._begin()
    assert file._file.path != first
    with pytest.raises(OSError, match="No such file"):
        LedgerFile(file.injection, tmp_path / "gone")

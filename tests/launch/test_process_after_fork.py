"""The ledger of a process as its file tells it: after a fork, in a process group, beside engines."""

import threading
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
from shaketable.sites.phases import phase

PLAN = "gain:0.5@module.linear"


class File:
    """A `KeptFile` that no thread keeps: content is asked for when it is wanted."""

    def __init__(self, path, ask, news):
        self.path, self.ask, self.news = path, ask, news
        self.written, self.tried, self.caught_up = 0, 0, 0

    def start(self):
        pass

    def flush(self):
        self.written += 1

    def try_flush(self):
        self.tried += 1

    def catch_up(self):
        self.caught_up += 1


@pytest.fixture
def process(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_file, "KeptFile", File)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    injection = ProcessInjection(Plan.parse(PLAN))
    injection.enable()
    yield injection, LedgerFile(injection, tmp_path)
    injection.close(check=False)


def another():
    injection = ProcessInjection(Plan.parse(PLAN))
    return injection.enable()


def called(injection, times=1):
    model = nn.Sequential(nn.Linear(4, 4))
    injection.meet(model)
    for _ in range(times):
        model(torch.ones(2, 4))
    return model


def group(monkeypatch, rank=3, ranks=8, available=True, joined=True):
    found = SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: joined, get_rank=lambda: rank, get_world_size=lambda: ranks
    )
    monkeypatch.setattr(ledger_file, "dist", found)
    return found


def test_the_first_write_is_one_that_raises_and_later_ones_do_not(process):
    _, file = process
    assert (file._file.written, file._file.tried) == (1, 0)
    file.flush()
    assert (file._file.written, file._file.tried) == (1, 1)


def test_a_file_is_given_what_to_write_and_how_to_know_of_news(process):
    injection, file = process
    assert file._file.ask()["ledger"] == injection.ledger.to_dict() | {"processes": 1}
    before = file._file.news()
    called(injection)
    assert file._file.news() != before


def test_a_process_begins_with_nothing_refused_and_no_engine(process):
    _, file = process
    found = file._record()
    assert (found["refused"], found["engine"], found["forked"], found["models"], found["late"]) == (None, False, False, [], [])
    assert (found["unmatched"], found["unmatched_models"], found["phases"]) == ([], [], [])


def test_a_fork_has_locks_that_no_thread_of_the_parent_holds(process):
    injection, file = process
    injection.calls._lock.acquire()
    thread = threading.Thread(target=injection.attaching.acquire)
    thread.start()
    thread.join()
    file.after_fork()
    assert not injection.calls._lock.locked()
    assert injection.attaching.acquire(blocking=False)
    injection.attaching.release()
    assert injection.attaching.acquire(blocking=False) and injection.attaching.acquire(blocking=False), "by one thread, twice"
    called(injection)
    assert file._record()["ledger"]["forward"] == 1


def test_a_fork_begins_at_its_own_time_with_a_file_of_its_own(process, monkeypatch):
    _, file = process
    first = file._file
    monkeypatch.setattr(ledger_file, "time", SimpleNamespace(time=lambda: 12.5))
    file.after_fork()
    assert file._record()["started"] == 12.5 and file._file.path.parent == first.path.parent
    assert file._file is not first and file._file.path != first.path


def test_a_fork_knows_whose_child_it_is_whatever_the_framework_says_now(process, monkeypatch):
    _, file = process
    monkeypatch.setattr(process_identity, "current_place", lambda: Place("Sampler#2", "id"))
    assert (file._record()["place"], file._record()["actor"]) == ("Sampler#2", "id")
    file.after_fork()
    assert (file._record()["place"], file._record()["actor"]) == ("child of Sampler#2", "")
    file.after_fork()
    assert file._record()["place"] == "child of child of Sampler#2"


def test_a_place_that_changes_is_told_anew(process, monkeypatch):
    _, file = process
    for label, shown in (("", ""), ("driver", "driver"), ("Sampler#1", "Sampler#1"), ("", "Sampler#1")):
        monkeypatch.setattr(process_identity, "current_place", lambda label=label: Place(label))
        assert file._record()["place"] == shown


@pytest.mark.parametrize("inherits", [False, True])
def test_the_group_of_the_parent_is_not_that_of_its_fork(process, monkeypatch, inherits):
    _, file = process
    monkeypatch.setenv("RANK", "3")
    now = group(monkeypatch, joined=inherits)
    file.after_fork()
    now.is_initialized = lambda: True
    assert file.note_rank() == (None if inherits else (3, 8)) == file._record()["distributed"]


@pytest.mark.parametrize(("variable", "noted"), [("RANK", (3, 8)), ("LOCAL_RANK", (3, 8)), ("WORLD_SIZE", None), (None, None)])
def test_a_launcher_of_ranks_is_known_by_one_of_two_variables(process, monkeypatch, variable, noted):
    _, file = process
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if variable:
        monkeypatch.setenv(variable, "0")
    group(monkeypatch)
    assert file.note_rank() == noted


def test_the_first_group_that_was_joined_is_the_one_that_is_told(process, monkeypatch):
    _, file = process
    monkeypatch.setenv("RANK", "3")
    group(monkeypatch)
    assert file.note_rank() == (3, 8)
    group(monkeypatch, rank=0, ranks=2)
    assert file.note_rank() == (3, 8) == file.distributed


def test_a_torch_without_process_groups_is_asked_for_none(process, monkeypatch):
    _, file = process
    monkeypatch.setenv("RANK", "3")
    group(monkeypatch, available=False).is_initialized = None
    assert file.note_rank() is None
    file.after_fork()
    assert file._record()["distributed"] is None


def test_a_fork_has_met_nothing_that_does_not_match_and_is_told_so_to_whoever_tells(process, tmp_path):
    injection, file = process
    injection.notices = Notices(injection, tmp_path)
    injection.notices.trained = True
    injection.unmatched_models.add(("Net", "train"))
    file.engines.append(("Engine", injection, injection.ledger))
    called(injection)
    file.after_fork()
    found = file._record()
    assert (found["unmatched_models"], found["trained"], found["engine"]) == ([], False, False)
    assert found["models"] == ["Sequential"] and injection.inert_check.phases.total() == 0 and injection.ledger.forward == 0


def test_a_process_that_nobody_tells_anything_can_fork(process):
    injection, file = process
    assert injection.notices is None
    file.after_fork()
    assert file.fork and file._record()["trained"] is False


def test_an_engine_is_news_before_it_has_done_anything(process):
    _, file = process
    other, before = another(), file._news()
    file.engines.append(("Engine", other, other.ledger))
    assert file._news() != before
    before = file._news()
    called(other)
    assert file._news()[0] == before[0] + 1
    other.close(check=False)


def test_phases_of_engines_are_phases_of_the_process_in_the_order_of_the_language(process):
    injection, file = process
    other = another()
    file.engines.append(("Engine", other, other.ledger))
    called(injection)
    with phase("rollout"):
        called(other, 2)
    assert file._record()["phases"] == [name for name in ledger_file.PHASES if name in ("rollout", "train")]
    assert file._passes() == {"rollout": 2, "train": 1, "eval": 0}
    other.close(check=False)


def test_what_an_engine_did_is_looked_at_with_the_rest(process):
    injection, file = process
    seen, other = [], another()
    called(injection)
    called(other, 4)
    injection.notices = SimpleNamespace(trained=False, look=lambda sites: seen.append([site.forward for site in sites]))
    file.engines.append(("Engine", other, other.ledger))
    assert file._record()["ledger"]["forward"] == 5 and seen == [[5]]
    injection.notices = None
    other.close(check=False)


@pytest.mark.parametrize("whose", ["process", "engine", None])
def test_where_a_gpu_counts_there_is_always_something_to_look_at(process, monkeypatch, whose):
    injection, file = process
    other = another()
    file.engines.append(("Engine", other, other.ledger))
    if whose:
        monkeypatch.setattr((injection if whose == "process" else other).tables, "all", [object()])
    file.catch_up()
    assert (file._file.tried, file._file.caught_up) == ((1, 0) if whose else (0, 1))
    monkeypatch.undo()
    other.close(check=False)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/a/b/train.py"], "train.py"),
        (["-c"], "-c"),
        (["x/train.py", "a", "b c"], "train.py a b c"),
        (["train.py", "1" * 100], "train.py " + "1" * 51),
        ([], "python"),
    ],
)
def test_a_command_is_the_name_of_the_program_and_its_arguments_up_to_sixty_characters(process, monkeypatch, words, shown):
    monkeypatch.setattr(ledger_file.sys, "argv", words)
    assert process[1]._record()["command"] == shown


def test_reasons_are_told_once_each_and_at_most_eight(process):
    injection, file = process
    injection.unmatched += ["b", "a", "b", "b", "c"]
    assert file._record()["unmatched"] == ["a", "b", "c"]
    injection.unmatched += [str(n) for n in range(9)]
    assert file._record()["unmatched"] == [str(n) for n in range(8)]

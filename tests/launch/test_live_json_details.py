"""The file that follows a process: when it is written, what is told of a disk that is full, and the thread that does it."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from shaketable.launch import live_json
from shaketable.launch.live_json import PAUSE, SHARE, KeptFile, pause_after


@pytest.fixture
def threads(monkeypatch):
    """Threads that would have been started: none is."""
    made = []

    class Thread:
        def __init__(self, **options):
            self.options, self.started = options, False
            made.append(self)

        def start(self):
            self.started = True

    monkeypatch.setattr(live_json, "threading", SimpleNamespace(Thread=Thread, Lock=threading.Lock))
    return made


@pytest.fixture
def disk(monkeypatch, threads, tmp_path):
    """Counts what this test writes, and raises where its disk is full; files that other tests left keep being written."""
    found = SimpleNamespace(writes=0, error=None)
    original = live_json.replacing

    @contextmanager
    def replacing(path):
        if path.is_relative_to(tmp_path):
            if found.error is not None:
                raise found.error
            found.writes += 1
        with original(path) as draft:
            yield draft

    monkeypatch.setattr(live_json, "replacing", replacing)
    return found


def test_one_thread_keeps_the_file_and_does_not_keep_a_program_from_ending(tmp_path, threads):
    file = KeptFile(tmp_path / "f.json", dict)
    (thread,) = threads
    assert thread.started and thread.options["daemon"] is True and thread.options["target"] == file._keep_flushing


def test_the_file_is_there_when_it_is_made_before_any_thread_has_looked(tmp_path, threads):
    file = KeptFile(tmp_path / "f.json", lambda: {"n": 0})
    assert file.path == tmp_path / "f.json" and json.loads(file.path.read_text()) == {"n": 0}


def test_what_is_written_already_is_not_written_again(tmp_path, disk):
    state = {"n": 0}
    file = KeptFile(tmp_path / "f.json", lambda: dict(state))
    file.flush()
    file.try_flush()
    assert disk.writes == 1
    for n, writes in ((1, 2), (1, 2), (0, 3)):
        state["n"] = n
        file.flush()
        assert disk.writes == writes and json.loads(file.path.read_text()) == {"n": n}


def test_without_news_of_its_own_the_content_is_asked_for_each_time(tmp_path, disk):
    asked = []
    file = KeptFile(tmp_path / "f.json", lambda: asked.append(1) or {"n": len(asked)})
    for n in (2, 3):
        file.catch_up()
        assert json.loads(file.path.read_text()) == {"n": n}


def test_after_a_flush_there_is_no_news(tmp_path, disk):
    asked, state = [], {"n": 0}
    file = KeptFile(tmp_path / "f.json", lambda: asked.append(1) or dict(state), lambda: state["n"])
    state["n"] = 1
    file.flush()
    asked.clear()
    file.catch_up()
    assert asked == []
    state["n"] = 0
    file.catch_up()
    assert asked == [1], "whatever is another thing is news, also when it was there before"


def test_news_without_another_content_is_looked_at_once_and_not_written(tmp_path, disk):
    asked, news = [], [0]
    file = KeptFile(tmp_path / "f.json", lambda: asked.append(1) or {"a": 1}, lambda: news[0])
    news[0] = 1
    file.catch_up()
    file.catch_up()
    assert len(asked) == 2 and disk.writes == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_each_time_that_a_disk_becomes_full_is_told_once(tmp_path, disk, capsys, error):
    state = {"n": 0}
    file = KeptFile(tmp_path / "f.json", lambda: dict(state), lambda: state["n"])
    line = f"shaketable: cannot write {file.path}: {error.strerror}; it is behind what was done\n"
    for n in (1, 4):
        disk.error = error
        for more in (0, 1):
            state["n"] = n + more
            file.catch_up()
        assert capsys.readouterr().err == line
        disk.error = None
        file.catch_up()
        assert json.loads(file.path.read_text()) == {"n": n + 1} and capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_when_it_is_made_is_told_and_raises_only_where_it_is_asked_for(tmp_path, disk, capsys):
    disk.error = OSError(28, "No space left on device")
    file = KeptFile(tmp_path / "f.json", lambda: {"n": 0})
    assert "No space left on device" in capsys.readouterr().err and not file.path.exists()
    with pytest.raises(OSError, match="No space left"):
        file.flush()
    disk.error = None
    file.flush()
    assert json.loads(file.path.read_text()) == {"n": 0}


def test_an_error_that_is_not_of_the_disk_is_not_swallowed(tmp_path, disk):
    state = {"n": 0}
    file = KeptFile(tmp_path / "f.json", lambda: dict(state))
    state["n"] = object()
    with pytest.raises(TypeError):
        file.try_flush()
    state["n"] = 1
    file.flush()
    assert json.loads(file.path.read_text()) == {"n": 1}, "it can be written afterwards: nothing is locked"


def test_a_raising_disk_leaves_the_file_unlocked(tmp_path, disk):
    file = KeptFile(tmp_path / "f.json", lambda: {"n": 0})
    file._written, disk.error = "", OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        file.flush()
    assert not file._lock.locked()


@pytest.mark.parametrize(
    ("cost", "before", "pause"),
    [
        (0.0, 0.0, 0.05),
        (0.0025, 0.0025, 0.05),
        (0.003, 0.003, 0.06),
        (1.0, 0.01, 0.2),
        (0.01, 1.0, 0.2),
        (2.0, 1.0, 20.0),
    ],
)
def test_a_pause_is_twenty_times_the_cheaper_of_two_writes_and_never_less_than_a_twentieth_of_a_second(cost, before, pause):
    assert pause_after(cost, before) == pytest.approx(pause) and (PAUSE, SHARE) == (0.05, 20)


def test_the_thread_pauses_looks_and_pauses_for_what_the_last_two_looks_took(monkeypatch):
    done, clock = [], iter([0.0, 0.01, 1.0, 1.02, 2.0, 2.05, 3.0, 3.0, 4.0, 4.05])

    def sleep(seconds):
        done.append(round(seconds, 6))
        if len(done) == 11:
            raise KeyboardInterrupt

    monkeypatch.setattr(live_json, "time", SimpleNamespace(sleep=sleep, thread_time=lambda: next(clock)))
    with pytest.raises(KeyboardInterrupt):
        KeptFile._keep_flushing(SimpleNamespace(catch_up=lambda: done.append("look")))
    assert done == [0.05, "look", 0.05, "look", 0.2, "look", 0.4, "look", 0.05, "look", 0.05]

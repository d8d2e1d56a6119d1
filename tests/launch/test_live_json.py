"""The file that follows what a process does."""

import json
import time
from types import SimpleNamespace

import pytest

from shaketable.launch import live_json
from shaketable.launch.live_json import PAUSE, SHARE, KeptFile, pause_after


def test_one_slow_write_delays_nothing_and_two_do():
    """The first write of a worker pays for imports. A pause of a second after it lost what a killed worker did next."""
    assert pause_after(0.05, 0.0) == PAUSE
    assert pause_after(0.0001, 0.05) == PAUSE
    assert pause_after(0.05, 0.04) == SHARE * 0.04


def test_catching_up_writes_only_what_is_new(tmp_path):
    state, asked = {"n": 0}, []
    file = KeptFile(tmp_path / "f.json", lambda: asked.append(1) or dict(state), lambda: state["n"])
    file.catch_up()
    assert len(asked) == 1
    state["n"] = 1
    file.catch_up()
    assert json.loads(file.path.read_text()) == {"n": 1} and len(asked) == 2


def test_news_that_comes_while_it_is_written_is_written_the_next_time(tmp_path):
    """The clock may look in the middle of a pass; what it then wrote must not count as all of it."""
    state = {"n": 0}

    def ask():
        seen = dict(state)
        state["n"] = 1
        return seen

    file = KeptFile(tmp_path / "f.json", ask, lambda: state["n"])
    file.catch_up()
    assert json.loads(file.path.read_text()) == {"n": 1}


@pytest.mark.attack("full disks")
def test_a_file_that_cannot_be_written_is_told_once_and_has_everything_later(tmp_path, capsys):
    state, folder = {"n": 0}, tmp_path / "l"
    folder.mkdir()
    file = KeptFile(folder / "f.json", lambda: dict(state), lambda: state["n"])
    file.path.unlink()
    folder.rmdir()
    for n in (1, 2):
        state["n"] = n
        file.catch_up()
    with pytest.raises(OSError, match="No such file"):
        file.flush()
    assert (
        capsys.readouterr().err
        == f"shaketable: cannot write {file.path}: No such file or directory; it is behind what was done\n"
    )
    folder.mkdir()
    file.catch_up()
    assert json.loads(file.path.read_text()) == {"n": 2}


def test_what_changes_is_written_and_flush_writes_at_once(tmp_path):
    state = {"n": 0}
    file = KeptFile(tmp_path / "f.json", lambda: dict(state), lambda: state["n"])
    assert json.loads(file.path.read_text()) == {"n": 0}
    state["n"] = 1
    file.flush()
    assert json.loads(file.path.read_text()) == {"n": 1}
    state["n"] = 2
    until = time.monotonic() + 60
    while json.loads(file.path.read_text()) != {"n": 2} and time.monotonic() < until:
        time.sleep(0.01)
    assert json.loads(file.path.read_text()) == {"n": 2}


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    content, path = {"a": 1}, tmp_path / "file.json"
    kept = KeptFile(path, lambda: dict(content))

    def half(self, text, **_):
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "no space left")

    monkeypatch.setattr(type(path), "write_text", half)
    content["a"] = 2
    kept.try_flush()
    assert path.read_text() == '{"a": 1}'


def test_the_first_write_of_a_process_is_followed_by_a_short_pause_and_the_second_slow_one_by_a_long_one(monkeypatch):
    pauses, clock = [], iter([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(live_json, "time", SimpleNamespace(sleep=sleep, thread_time=lambda: next(clock)))
    with pytest.raises(KeyboardInterrupt):
        KeptFile._keep_flushing(SimpleNamespace(catch_up=lambda: None))
    assert pauses == [PAUSE, PAUSE, SHARE * 0.5, SHARE * 0.5]

"""The lock of a run: one worker at a time, and any number who look."""

import errno
import fcntl
import threading

import pytest

from shaketable.errors import ShaketableError
from shaketable.io.locks import FOLDER, held, is_held

pytestmark = pytest.mark.attack("two processes on one study")


def test_a_run_is_held_while_somebody_works_on_it(tmp_path):
    assert not is_held(tmp_path, "one"), "nobody ever did"
    with held(tmp_path, "one") as mine:
        assert mine and is_held(tmp_path, "one") and not is_held(tmp_path, "two")
        with held(tmp_path, "one") as theirs:
            assert not theirs
    assert not is_held(tmp_path, "one")


def test_looking_at_a_lock_is_not_working_on_the_run(tmp_path):
    with held(tmp_path, "one"):
        pass
    with (tmp_path / FOLDER / "one").open("r") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another process looks at this moment
        assert not is_held(tmp_path, "one")


def test_a_disk_without_locks_is_one_line_and_nobody_is_taken_for_a_worker(tmp_path, monkeypatch):
    def refuses(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(ShaketableError, match=r"cannot lock .*one: No locks available"), held(tmp_path, "one"):
        pass
    assert not is_held(tmp_path, "one")


def test_a_lock_that_is_given_back_meanwhile_is_waited_for(tmp_path):
    first = held(tmp_path, "one")
    first.__enter__()
    later = threading.Timer(0.3, first.__exit__, (None, None, None))
    later.start()
    with held(tmp_path, "one", wait=30.0) as mine:
        assert mine
    later.join()

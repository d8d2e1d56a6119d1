"""One process at a time: a lock on a file that dies with its process, kill -9 included.

The lock of a study's run lies beside the run's folder and not in it, so that it can be taken before there is a folder. A lock
file is never deleted: one that is removed while another process waits for it would let two of them in.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shaketable.errors import ShaketableError

FOLDER = ".locks"


def take(file: IO[str], wait: float = 0.0) -> bool:
    """Try to lock an open file for `wait` seconds; the lock ends with the file.

    Raises:
        OSError: The disk has no locks.
    """
    until = time.monotonic() + wait
    while not _locked(file, fcntl.LOCK_EX):
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def is_taken(path: Path) -> bool:
    """Whether a process holds the lock of a file now; never where there is no such file, or a disk without locks."""
    try:
        file = path.open()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
    with file:
        try:
            return not _locked(file, fcntl.LOCK_SH)
        except OSError:
            return False


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, where: str, wait: float = 0.0, *, make_folder: bool = False) -> Iterator[bool]:
    """Try to lock a file, for `wait` seconds; yields whether it is ours. Errors say `where` it lies."""
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ShaketableError(f"cannot write in {where}: {error.strerror or error}") from None
    with file:
        try:
            mine = take(file, wait)
        except OSError as error:
            raise ShaketableError(f"cannot lock {path}: {error.strerror or error}") from None
        yield mine


@contextmanager
def held(runs: Path, name: str, *, wait: float = 0.0) -> Iterator[bool]:
    """Try to get a run's lock, for `wait` seconds; yields whether it is ours."""
    path = runs / FOLDER / name
    with locked(path, f"the store {runs}", wait, make_folder=True) as mine:
        yield mine


def is_held(runs: Path, name: str) -> bool:
    """Whether a process works on a run now."""
    return is_taken(runs / FOLDER / name)

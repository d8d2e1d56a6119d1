"""One process at a time works on a run: a lock that dies with its process, kill -9 included.

The lock lies beside the run's folder and not in it, so that it can be taken before there is a folder. It is never deleted: a
lock file that is removed while another process waits for it would let two of them in.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shaketable.errors import ShaketableError

FOLDER = ".locks"


@contextmanager
def held(runs: Path, name: str, *, wait: float = 0.0) -> Iterator[bool]:
    """Try to get a run's lock, for `wait` seconds; yields whether it is ours."""
    path = runs / FOLDER / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ShaketableError(f"cannot write in the store {runs}: {error.strerror or error}") from None
    with file:
        yield _taken(file.fileno(), time.monotonic() + wait)


def is_held(runs: Path, name: str) -> bool:
    """Whether a process works on a run now."""
    path = runs / FOLDER / name
    if not path.exists():
        return False
    with path.open("r") as file:
        return not _taken(file.fileno(), 0.0, fcntl.LOCK_SH)


def _taken(file: int, until: float, kind: int = fcntl.LOCK_EX) -> bool:
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        else:
            return True

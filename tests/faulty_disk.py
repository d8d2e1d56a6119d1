"""A disk that fails from its n-th use on: full, read-only, or with the process killed at that moment.

What counts as a use is whatever changes the disk: making a folder or a file, each write, each sync, each renaming. Python's own
functions are patched, so that every one of them can fail in turn, which no real disk does when it is asked to.
"""

import errno
import io
import os
import pathlib
import signal
from contextlib import contextmanager


def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_only(path):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def killed(path):
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyDisk:
    """Fails at its `at`-th use, in `folder`, and at each after it."""

    def __init__(self, folder, at, fails=full):
        self.folder, self.at, self.fails, self.used = os.path.realpath(folder), at, fails, 0

    def use(self, path):
        if isinstance(path, int) or not os.path.realpath(path).startswith(self.folder):
            return
        self.used += 1
        if self.used >= self.at:
            self.fails(path)

    @contextmanager
    def working(self, monkeypatch):
        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "mkdir"),
                (os, "replace"),
                (os, "rename"),
                (pathlib.Path, "replace"),
                (pathlib.Path, "touch"),
            ):
                patch.setattr(owner, name, self._before(getattr(owner, name)))
            patch.setattr(io, "open", self._opened(io.open))
            patch.setattr(os, "fsync", self._synced(os.fsync))
            yield self

    def _before(self, real):
        def used(path, *more, **named):
            self.use(path)
            return real(path, *more, **named)

        return used

    def _synced(self, real):
        def used(file):
            self.use(os.readlink(f"/proc/self/fd/{file}"))
            return real(file)

        return used

    def _opened(self, real):
        def opened(path, mode="r", *more, **named):
            if not set(mode) & set("wax+"):
                return real(path, mode, *more, **named)
            if not os.path.exists(path):
                self.use(path)
            file = real(path, mode, *more, **named)
            write = file.write

            def written(content):
                self.use(path)
                return write(content)

            file.write = written
            return file

        return opened


def every_use(monkeypatch, folder_of, act, fails=full, most=200):
    """Do something on disks that fail at the 1st, 2nd, … use, until one is large enough; yields (number, folder, error)."""
    for at in range(1, most):
        folder = folder_of(at)
        disk = FaultyDisk(folder, at, fails)
        error = None
        with disk.working(monkeypatch):
            try:
                act(folder)
            except Exception as caught:
                error = caught
        if disk.used < at:
            assert error is None
            assert at > 1, "it was never used"
            return
        yield at, folder, error
    raise AssertionError(f"{most} uses and no end")

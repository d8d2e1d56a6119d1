"""Files that are there as a whole or not at all: written beside their place, then moved there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITER = "shaketable-file"
"""Name of the thread that keeps a ledger on disk up to date."""


@contextmanager
def replacing(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """A draft to write to, which takes the place of `path` when that went well.

    Args:
        path: Where the file is to be.
        lasting: Wait until the disk has it: for what must survive a power cut.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        if lasting:
            sync(draft)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    if lasting:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

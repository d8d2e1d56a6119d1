"""What was read from records, remembered between two listings: a cache in SQLite, and only that.

A row holds what one record said, under the stamp (times and sizes) that its files had then. The answer never depends on the
index: it may be missing, torn, from another version, locked by others or on a disk that cannot be written, and then records
are read again. SQLite does not notice a flipped bit in its own file, so every row carries a checksum of itself.

Rejected: one JSON file of all rows (two listings at once lose each other's work, and ten thousand rows are written anew for
one), and a file beside each record (ten thousand more files to open, which is what the index is there to save).
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FILE = ".index.sqlite"
VERSION = 2
"""To be raised whenever a row means something else."""
_WAIT = 0.25
_NOT_OURS_TO_MEND = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_PERM,
}


class Index:
    """The cache of one store. Neither method ever fails: without a usable file nothing is known, and nothing is kept."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILE

    def read(self, below: str = "") -> dict[str, tuple[str, bytes]]:
        """The stamp and the facts of every path that begins like this."""
        return self._ask(lambda db: _rows(db, below)) or {} if self.path.is_file() else {}

    def write(self, rows: Iterable[tuple[str, str, bytes]], gone: Iterable[str]) -> None:
        """Keep these rows (path, stamp, facts), and forget those paths."""
        new, old = [(*row, _sum(*row)) for row in rows], [(path,) for path in gone]
        if new or old:
            self._ask(lambda db: _keep(db, new, old))

    def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Do something with the database; None when that goes wrong, and a file that is no index is removed.

        A damaged schema makes Python stumble over SQLite's own message, which is then no text: hence the second exception.
        """
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)) as db:
                return work(db)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code & 0xFF not in _NOT_OURS_TO_MEND:
                self._remove()
            return None

    def _remove(self) -> None:
        for path in (self.path.with_name(f"{FILE}-journal"), self.path):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return


def _rows(db: sqlite3.Connection, below: str) -> dict[str, tuple[str, bytes]]:
    if _version(db) != VERSION:
        return {}
    rows = db.execute("SELECT path, stamp, facts, sum FROM runs WHERE substr(path, 1, ?) = ?", (len(below), below))
    return {path: (stamp, facts) for path, stamp, facts, checksum in rows if checksum == _sum(path, stamp, facts)}


def _keep(db: sqlite3.Connection, new: list[tuple[str, str, bytes, int]], old: list[tuple[str]]) -> None:
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN IMMEDIATE")
    if _version(db) != VERSION:
        db.execute("DROP TABLE IF EXISTS runs")
        db.execute("CREATE TABLE runs (path TEXT PRIMARY KEY, stamp TEXT, facts BLOB, sum INTEGER)")
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", new)
    db.executemany("DELETE FROM runs WHERE path = ?", old)
    db.execute("COMMIT")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _sum(path: object, stamp: object, facts: object) -> int:
    """Of whatever the columns hold: a damaged file can give other types than were put in."""
    return zlib.crc32(repr((path, stamp, facts)).encode(errors="replace"))

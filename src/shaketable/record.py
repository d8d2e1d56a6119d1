"""The run record: one folder per run, one append-only file in it, a line of JSON per event.

The first line says what the run is: schema, id, verb, resolved configuration, environment. Every later line is an event
that happened. Nothing is ever rewritten: a run that was killed and resumed appends a `resumed` event that names the step it
went on from, and whoever reads the record leaves out what was done after that step and is done again. A kill can tear the
last line; a torn line was never an event, and is cut off before the next one is written.

Rejected: one JSON file written at the end (a kill loses everything), and a database (nobody can look into it with `less`).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError

SCHEMA = "shaketable.run/1"
FILE = "record.jsonl"


class RunRecord:
    """The record of one run. Make it with `create`, or go on with `open`."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        self.head = head

    @classmethod
    def create(cls, folder: Path, verb: str, config: dict[str, Any], environment: dict[str, Any]) -> RunRecord:
        """A new record in a folder that does not exist yet, or is empty."""
        check_new(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).touch(exist_ok=False)  # of two runs that find the folder empty, one makes the file
        except OSError as error:
            raise ShaketableError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"schema": SCHEMA, "event": "run", "id": uuid.uuid4().hex, "verb": verb, "started": started}
        record = cls(folder, head | {"config": config, "environment": environment})
        record._write(record.head)
        return record

    @classmethod
    def open(cls, folder: Path, verb: str) -> RunRecord:
        """The record of a run that is to go on."""
        if not (folder / FILE).is_file():
            raise ShaketableError(f"there is no run to resume in {folder}: it has no {FILE}")
        record = cls(folder, {})
        head = next(record._lines(), {})
        if head.get("schema") != SCHEMA or head.get("verb") != verb:
            raise ShaketableError(f"{folder} holds no run of `shaketable {verb}` that this version can resume")
        record.head = head
        return record

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run began with."""
        return dict(self.head["config"])

    def append(self, event: str, **facts: Any) -> None:
        """Add an event; it is on disk when this returns."""
        self._write({"event": event, "time": round(time.time(), 3), **facts})

    def resumed(self, step: int) -> None:
        """The run goes on from `step`: what the record says of later steps is void."""
        self.append("resumed", step=step)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What happened and holds, in order; of the given kinds, or all."""
        held: list[dict[str, Any]] = []
        for line in self._lines():
            if line["event"] == "resumed":
                held = [e for e in held if e.get("step", -1) <= line["step"]]
            held.append(line)
        return [e for e in held if not kinds or e["event"] in kinds]

    def _lines(self) -> Iterator[dict[str, Any]]:
        with (self.folder / FILE).open("rb") as file:  # bytes: a torn line may end within a character
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield self._event(number, line)

    def _event(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or ("event" not in event and number > 1):
            raise ShaketableError(f"{self.folder / FILE} is damaged: line {number} is no event")
        return event

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work on this run; an error when another process does."""
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ShaketableError(f"another process is working on the run in {self.folder}") from None
            yield

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(_strict(event), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self._cut_torn_line()
            with (self.folder / FILE).open("ab", buffering=0) as file:
                whole, rest = file.tell(), memoryview(line.encode())
                try:
                    while rest:
                        rest = rest[file.write(rest) or 0 :]
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.folder / FILE, whole)
                    raise
        except OSError as error:
            where = self.folder / FILE
            raise ShaketableError(f"cannot write {where}: {error.strerror or error}; what it held before is kept") from None

    def _cut_torn_line(self) -> None:
        path = self.folder / FILE
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() in (b"", b"\n"):
                return
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _strict(value: Any) -> Any:
    """The value as strict JSON has it: a number that is not finite is null."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_new(folder: Path) -> None:
    """Raise unless a run can be put here: there is no such folder yet, or nothing is in it."""
    try:
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise ShaketableError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
    if taken:
        raise ShaketableError(f"{folder} is not empty and nothing is overwritten; choose another --out, or --resume it")


def unique_folder(parent: Path, name: str) -> Path:
    """A folder name that nobody has used: the time to the second, and a number if that is taken."""
    stem = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, n = stem, 1
    while folder.exists():
        n += 1
        folder = stem.with_name(f"{stem.name}-{n}")
    return folder

"""The run record: one folder per run, one append-only file in it, a line of JSON per event.

The first line says what the run is: schema, id, verb, resolved configuration, environment. Every later line is an event
that happened. Nothing is ever rewritten: a run that was killed and resumed appends a `resumed` event that names the step it
went on from, and readers leave out the steps after it, which are done again. A kill can tear the
last line; a torn line was never an event, and is cut off before the next one is written.

The lines are a chain: each ends in `"sha"`, the first 16 digits of the SHA-256 of the sha before it and of its own bytes. So a
line that was edited, dropped, put in or moved is found, and reading stops there with its number. This finds accidents and quiet
edits. A whole new chain with a new seal is accepted; only the digest of the study (`study/store.py`), compared with one that
was published or signed elsewhere, finds that.

The chain cannot see that its end is missing. The `finished` event therefore seals the record: `record.seal` says how many lines
and bytes there are and what the last sha is, and nothing can be added any more. A finished record without a seal was killed
between the two; it is whole as far as anybody can know, and `seal()` makes up for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import is_taken, locked
from shaketable.io.replacing import replacing
from shaketable.io.strict_json import strict

FILE = "record.jsonl"
SEAL = "record.seal"
SCHEMA = "shaketable.run/2"
_LINK = re.compile(rb', "sha": "([0-9a-f]{16})"}\n')
_LINK_BYTES = 29
_PATIENCE = 0.2
"""Seconds that `alone` waits: a caller of `busy` holds the lock for a moment."""


class RunRecord:
    """The record of one run. Make it with `create`, or resume it with `open`."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        self.head = head
        self._end = (-1, "", False)  # bytes, last sha, finished: as this process left the file

    @classmethod
    def create(
        cls,
        folder: Path,
        verb: str,
        config: dict[str, Any],
        environment: dict[str, Any],
        about: dict[str, Any] | None = None,
    ) -> RunRecord:
        """A new record in a folder that does not exist yet, or is empty.

        Args:
            folder: Where.
            verb: The verb of the command line that the run is of.
            config: Resolved.
            environment: Versions, devices, revision.
            about: Of a study's run: the study, arm, seed and key.
        """
        check_new(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).touch(exist_ok=False)  # of two runs that find the folder empty, one makes the file
        except OSError as error:
            raise ShaketableError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        head = {"schema": SCHEMA, "event": "run", "id": uuid.uuid4().hex, "verb": verb, "started": started}
        record = cls(folder, head | {"about": about or {}, "config": config, "environment": environment})
        record._write(record.head)
        return record

    @classmethod
    def open(cls, folder: Path, verb: str | None = None) -> RunRecord:
        """The record of a run that is there, of one verb or any. All of it is read: a changed record is refused here."""
        if not (folder / FILE).is_file():
            raise ShaketableError(f"there is no run to resume in {folder}: it has no {FILE}")
        record = cls(folder, {})
        lines = record._lines()
        head = next(lines, {})
        if head.get("schema") != SCHEMA or verb not in (None, head.get("verb")):
            what = "run" if verb is None else f"run of `shaketable {verb}`"
            raise ShaketableError(f"{folder} holds no {what} that this version can resume")
        record.head = head
        for _ in lines:
            pass
        return record

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.head["config"])

    # ---- writing

    def append(self, event: str, **facts: Any) -> None:
        """Add an event; it is on disk when this returns. `finished` is the last one, and seals the record."""
        self._write({"event": event, "time": round(time.time(), 3), **facts})
        if event == "finished":
            self.seal()

    def resumed(self, step: int) -> None:
        """The run resumes from `step`: what the record says of later steps is void."""
        self.append("resumed", step=step)

    def seal(self) -> None:
        """Declare a finished record whole. Does nothing the second time."""
        reading = ChainReader(self.folder / FILE)
        events = [event["event"] for event in self._lines(reading)]
        if events[-1:] != ["finished"]:
            raise ShaketableError(f"the run in {self.folder} is not finished: its record cannot be sealed")
        if self.sealed() is None:
            facts = {"lines": reading.lines, "bytes": reading.size, "sha": reading.sha, "attempts": events.count("attempt")}
            with self._writing(SEAL):
                _cut_torn_line(self.folder / FILE)
                put_in_place(self.folder / SEAL, json.dumps(facts) + "\n")

    def _write(self, event: dict[str, Any]) -> None:
        body = json.dumps(strict(event), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
        with self._writing(FILE):
            size, previous, finished = self._found_end()
            if finished:
                raise ShaketableError(f"the run in {self.folder} is finished: nothing is added to its record")
            sha = link(previous, body)
            line = linked(body, sha)
            _append(self.folder / FILE, line)
            self._end = (size + len(line), sha, event["event"] == "finished")

    def _found_end(self) -> tuple[int, str, bool]:
        """Where the next line goes and what it chains from; read again when another process has written meanwhile."""
        path = self.folder / FILE
        _cut_torn_line(path)
        size = path.stat().st_size
        if size and self._end[0] != size:
            body, sha = parted(path.read_bytes()[:-1].rpartition(b"\n")[2] + b"\n")
            if not sha:
                self.events()  # it says which line has no link
            self._end = (size, sha, (object_of(body) or {}).get("event") == "finished")
        return (size, *self._end[1:])

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = self.folder / name
            raise ShaketableError(f"cannot write {where}: {error.strerror or error}; what it held before is kept") from None

    # ---- reading

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What happened and holds, in order; of the given kinds, or all."""
        held: list[dict[str, Any]] = []
        for line in self._lines():
            if line["event"] == "resumed":
                held = [e for e in held if e.get("step") is None or e["step"] <= line["step"]]
            held.append(line)
        return [e for e in held if not kinds or e["event"] in kinds]

    def finished(self) -> dict[str, Any]:
        """The event that ended the run.

        Raises:
            ShaketableError: It has not ended.
        """
        found = self.events("finished")
        if not found:
            raise ShaketableError(f"the run in {self.folder} is not finished; resume it with --resume {self.folder}")
        return found[-1]

    def sealed(self) -> dict[str, Any] | None:
        """What the seal says; None without one."""
        path = self.folder / SEAL
        try:
            found = object_of(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
        if found is None or not is_seal(found):
            raise ShaketableError(f"{path} is damaged: it is not a seal")
        return found

    def _lines(self, reading: ChainReader | None = None) -> Iterator[dict[str, Any]]:
        seal = self.sealed()  # before the file: it speaks of a file that was whole by then
        reading = reading or ChainReader(self.folder / FILE)
        torn = 0
        try:
            with reading.path.open("rb") as file:  # bytes: a torn line may end within a character
                for line in file:
                    if line.endswith(b"\n"):
                        yield reading.take(line)
                    else:
                        torn = len(line)
        except OSError as error:
            raise ShaketableError(f"cannot read {reading.path}: {error.strerror or error}") from None
        if seal is not None:
            reading.check(seal, torn)

    # ---- one process at a time

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work on this run; an error when another process does."""
        with locked(self.folder / ".lock", str(self.folder), _PATIENCE) as mine:
            if not mine:
                raise ShaketableError(f"another process is working on the run in {self.folder}")
            yield

    def busy(self) -> bool:
        """Whether a process is inside `alone` of this run. Changes nothing, so that runs can be listed."""
        return is_taken(self.folder / ".lock")


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        whole, rest = file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[file.write(rest) or 0 :]
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, whole)
            raise


def _cut_torn_line(path: Path) -> None:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() in (b"", b"\n"):
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def put_in_place(path: Path, text: str) -> None:
    with replacing(path, lasting=True) as draft:
        draft.write_text(text, encoding="utf-8")


def check_new(folder: Path) -> None:
    """Raise unless a run can be put here: there is no such folder yet, or nothing is in it."""
    try:
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise ShaketableError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
    if taken:
        raise ShaketableError(f"{folder} is not empty and nothing is overwritten; choose another --out, or --resume it")


def is_begun(folder: Path) -> bool:
    """Whether there is a record to resume; removes a folder whose record was killed before its first line was whole."""
    if (folder / SEAL).exists():
        return True
    if not (folder / FILE).is_file() or b"\n" not in (folder / FILE).read_bytes()[: 1 << 20]:
        if folder.exists():
            shutil.rmtree(folder)
        return False
    return True


def unique_folder(parent: Path, name: str) -> Path:
    """A folder name that is not taken: the time to the second, and a number if that is taken."""
    stem = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, n = stem, 1
    while folder.exists():
        n += 1
        folder = stem.with_name(f"{stem.name}-{n}")
    return folder


# ---- the chain


@dataclass
class ChainReader:
    """How far a reader has come, and what the next line must chain from."""

    path: Path
    lines: int = 0
    size: int = 0
    sha: str = ""

    def take(self, line: bytes) -> dict[str, Any]:
        """The event of the next line, without its link; raises when this is not the line that was written there."""
        body, carried = parted(line)
        event, first = object_of(body), self.lines == 0
        self.lines, self.size, self.sha = self.lines + 1, self.size + len(line), link(self.sha, body)
        if first and event is not None and not carried and event.get("schema") not in (SCHEMA, None):
            raise ShaketableError(f"{self.path} is of another version: schema {event['schema']!r}")
        if event is None or not is_event(event):
            what = f"was changed at line {self.lines}" if carried != self.sha else "is damaged"
            raise ShaketableError(f"{self.path} {what}: line {self.lines} is not an event")
        if carried != self.sha:
            raise ShaketableError(f"{self.path} was changed at line {self.lines}")
        return event

    def check(self, seal: dict[str, Any], torn: int = 0) -> None:
        """Hold what was read against the seal; `torn` bytes came after the last whole line."""
        if self.size + torn < seal["bytes"]:
            raise ShaketableError(f"{self.path} was truncated: it ends after line {self.lines} of {seal['lines']}")
        if (self.lines, self.size + torn, self.sha) != (seal["lines"], seal["bytes"], seal["sha"]):
            raise ShaketableError(f"{self.path} was changed after it was finished")


def is_event(line: dict[str, Any]) -> bool:
    """Whether an object is an event: it has a kind, and its step, if any, is a number."""
    kind, step = line.get("event"), line.get("step")
    return isinstance(kind, str) and isinstance(step, int if kind == "resumed" else int | None)


def is_seal(found: dict[str, Any]) -> bool:
    """Whether an object is what `RunRecord.seal` writes."""
    kinds = {"lines": int, "bytes": int, "sha": str, "attempts": int | None}
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def link(previous: str, body: bytes) -> str:
    """The sha of a line: of the one before it, and of its own bytes."""
    return hashlib.sha256(previous.encode() + body).hexdigest()[:16]


def parted(line: bytes) -> tuple[bytes, str]:
    """A line's body and the sha that it carries; "" where it carries none."""
    found = _LINK.fullmatch(line[-_LINK_BYTES:])
    return (line[:-_LINK_BYTES] + b"}", found[1].decode()) if found else (line.removesuffix(b"\n"), "")


def linked(body: bytes, sha: str) -> bytes:
    return body[:-1] + f', "sha": "{sha}"}}\n'.encode()


def object_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

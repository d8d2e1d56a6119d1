"""The store: a folder of runs, and what each of them has come to, ten thousand of them in a second.

    <store>/<study>/definition/record.jsonl     what a study asks for; or study.json, the same without a history
    <store>/<study>/runs/<run>/record.jsonl     its runs
    <store>/<run>/record.jsonl                  a run of `train` or `sweep` put there with --out

The records are the truth; there is no list of runs that could disagree with them. A listing walks the folders, and reads of
each record the head and the last 64 KB: what the run is, where it stands, how it ended. The chain of those lines and the
seal are checked, and when something does not fit all of the record is read, to say where. An edit in the unread middle of a
long record that leaves its size as it was is found by whoever reads the record, not by a listing.

What was read is kept in an index under the times and sizes that the files had. A file touched in the last two seconds is not
kept: it could change once more without its times telling. Whether somebody works on a run is asked anew every time.

Rejected: a database that runs report to (they would need to reach it, and it could say what no record says), and a status
file beside each record (after a kill it is wrong).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.records.chain import SCHEMA, UNCHAINED, ChainReader, last_lines, object_of, parted
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.store.index import Index

WINDOW = 1 << 16
DEPTH = 3
"""Folders between the store and a run's own: the study's, `runs`, the run's."""
FRESH = 2.0
"""Seconds: the coarsest clock of a file system."""
DEFINES = "study"
"""The verb of a record that holds what a study asks for. It is no run."""
_TURNS = ("attempt", "resumed", "failed", "finished")
"""Events after which a run stands otherwise than before."""
_SCHEMAS = (SCHEMA, UNCHAINED)
_KINDS: dict[str, type] = {"seed": int, "steps": int}
"""What the head of a record says, where it is not a text."""


@dataclass(frozen=True)
class Summary:
    """One run, as its record and its lock show it now."""

    path: str
    """The run's folder, relative to the store."""
    status: str
    """`running`: somebody works on it. `partial`: begun, not finished, nobody works on it. `failed`, `done`, or `damaged`."""
    updated: float
    """When the record was last written, in seconds."""
    error: str | None = None
    """Why it failed, or what is damaged."""
    id: str | None = None
    verb: str | None = None
    study: str | None = None
    arm: str | None = None
    seed: int | None = None
    key: str | None = None
    started: str | None = None
    step: int | None = None
    """The last step that the end of the record speaks of."""
    steps: int | None = None
    """The steps that its configuration asks for."""
    attempts: int | None = None
    """How often it was begun by a study; None where only the middle of a long record, not yet sealed, could tell."""
    verified: bool = True
    """Whether its lines are chained. A record of an old schema is not, and any of its numbers may have been changed."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.rpartition("/")[2]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return dict(vars(self))


@dataclass(frozen=True)
class StudySummary:
    """One study's folder, and how its runs stand."""

    name: str
    key: str | None
    folder: str
    """Relative to the store."""
    counts: dict[str, int]
    """Runs by status; a run that has not begun is in none."""
    unverified: int
    """How many of those that are done have records without a chain."""
    wanted: int | None
    """How many runs the study has; None where `study.json` does not list them."""
    started: str | None
    updated: float | None
    error: str | None = None
    """What is wrong with `study.json`."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return dict(vars(self))


class Store:
    """A folder of runs and studies. It need not exist yet."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def summaries(self, under: Path | None = None) -> list[Summary]:
        """Every run in the store, in the order of their paths; or only those in `under`, a folder of it."""
        return [summary for summary in self._records(under) if not _defines(summary)]

    def paths(self) -> list[str]:
        """The folders of all records, definitions too, relative to the store."""
        return sorted(path for path, _ in _runs(str(self.root), "", DEPTH))

    def _records(self, under: Path | None) -> list[Summary]:
        top = "" if under is None else self._relative(under)
        index = Index(self.root)
        known, rows, found = index.read(top), [], []
        for path, stats in _runs(str(self.root), top, DEPTH):
            folder, stamp = self.root / path, _stamp(stats)
            was, text = known.pop(path, ("", b""))
            facts: dict[str, Any] = json.loads(text) if was == stamp else look(folder)
            if facts["status"] == "damaged" and not folder.exists():
                continue  # removed while it was read
            if was != stamp and _settled(stats):
                rows.append((path, stamp, json.dumps(facts).encode()))
            found.append(_now(folder, Summary(path=path, updated=_updated(stats), **facts)))
        index.write(rows, [path for path in known if not top or f"{path}/".startswith(f"{top}/")])
        return sorted(found, key=lambda summary: summary.path)

    def studies(self) -> list[StudySummary]:
        """Every study in the store, by the name of its folder."""
        return self.all()[1]

    def all(self) -> tuple[list[Summary], list[StudySummary]]:
        """Runs and studies, from one look at the store."""
        records, runs = self._records(None), dict[str, list[Summary]]()
        for summary in records:
            runs.setdefault(summary.path.partition("/")[0], []).append(summary)
        defined = {folder for folder, found in runs.items() if any(_defines(s) or "/runs/" in s.path for s in found)}
        names = defined | {file.parent.name for file in self.root.glob("*/study.json")}
        studies = [_study(self.root / name, runs.get(name, [])) for name in sorted(names)]
        return [summary for summary in records if not _defines(summary)], studies

    def _relative(self, folder: Path) -> str:
        path = os.path.relpath(folder, self.root)
        if path.startswith(".."):
            raise ShaketableError(f"{folder} is not in the store {self.root}")
        return "" if path == "." else path


Stats = tuple[os.stat_result | None, os.stat_result | None]
"""Of a run's record, and of its seal."""


def _runs(root: str, path: str, depth: int) -> Iterator[tuple[str, Stats]]:
    """The run folders at and below a path; what lies inside of a run is not looked at."""
    folder = f"{root}/{path}" if path else root
    stats = (_stat(f"{folder}/{FILE}"), _stat(f"{folder}/{SEAL}"))
    if stats != (None, None):
        yield path or ".", stats
    elif depth:
        for name in _folders(folder):
            yield from _runs(root, f"{path}/{name}" if path else name, depth - 1)


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):  # no store yet, or removed under our eyes
        return []
    except OSError as error:
        raise ShaketableError(f"cannot read {folder}: {error.strerror or error}") from None


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _stamp(stats: Stats) -> str:
    """Changes whenever a file was written; also when its old time was put back, for that is a change of its own."""
    return " ".join(f"{s.st_mtime_ns} {s.st_ctime_ns} {s.st_size}" if s else "0" for s in stats)


def _settled(stats: Stats) -> bool:
    return time.time() - max(max(s.st_mtime, s.st_ctime) for s in stats if s) > FRESH


def _updated(stats: Stats) -> float:
    return next(s.st_mtime for s in stats if s)


def _now(folder: Path, summary: Summary) -> Summary:
    if summary.status in ("partial", "failed") and RunRecord(folder, {}).busy():
        return replace(summary, status="running", error=None)
    return summary


def look(folder: Path) -> dict[str, Any]:
    """What a record says of its run, as the fields of a `Summary`; never `running`, which only the lock knows."""
    try:
        seal = RunRecord(folder, {}).sealed()
        head, events = _ends(folder, seal)
    except ShaketableError as error:
        return {"status": "damaged", "error": str(error).replace(f"{folder}{os.sep}", "")}
    if head is None:
        return {"status": "partial", "error": "it ended before its first line was written", "attempts": 0}
    if head.get("schema") not in _SCHEMAS:
        return {"status": "damaged", "error": f"it is of another version: schema {head.get('schema')!r}"}
    facts = _of_head(head)
    if any(not isinstance(value, _KINDS.get(name, str) | None) for name, value in facts.items()):
        return {"status": "damaged", "error": "its first line does not say what it is"}
    return facts | {"attempts": _attempts(events, seal), "verified": head["schema"] == SCHEMA} | _standing(events)


def _of_head(head: dict[str, Any]) -> dict[str, Any]:
    parts = [head.get(name) or {} for name in ("about", "config")]
    about, config = (part if isinstance(part, dict) else {} for part in parts)
    facts = {name: about.get(name) for name in ("study", "arm", "seed", "key")}
    return facts | {name: head.get(name) for name in ("id", "verb", "started")} | {"steps": config.get("steps")}


def _ends(folder: Path, seal: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The head, and the last events: all of them, head too, when they are few, or when it must be said what does not fit."""
    path, record = folder / FILE, RunRecord(folder, {})
    try:
        with path.open("rb") as file:
            size, line = os.fstat(file.fileno()).st_size, file.readline()
            start = ChainReader(path)
            head = start.take(line) if line.endswith(b"\n") else None
            if head is not None and head.get("schema") not in _SCHEMAS:
                return head, []
            if head is None or size <= WINDOW:
                return head, record.events()
            lines = last_lines(file, size, WINDOW)
    except OSError as error:
        raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
    events = _checked(path, lines, size, start.chained, seal)
    return head, record.events() if events is None else events


def _checked(
    path: Path, lines: list[bytes], size: int, chained: bool, seal: dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The last events, or None when they do not chain, or not end as the seal has it. The first is taken at its word."""
    reading = ChainReader(path, lines=1, sha=parted(lines[0])[1], chained=chained)
    try:
        first = ChainReader(path, lines=1, chained=False).take(lines[0])
        events = [first, *(reading.take(line) for line in lines[1:])]
    except ShaketableError:
        return None
    if seal is not None and (seal["bytes"] != size or (chained and seal["sha"] != reading.sha)):
        return None
    return events


def _attempts(events: list[dict[str, Any]], seal: dict[str, Any] | None) -> int | None:
    seen = [e for e in events if e["event"] == "attempt"]
    if events[0]["event"] == "run":
        return len(seen)
    if seal is not None:
        return seal.get("attempts")
    return seen[-1].get("number") if seen else None


def _standing(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the run stands: after the last of its turns, and at the last step."""
    step = next((e["step"] for e in reversed(events) if isinstance(e.get("step"), int)), -1)
    turn = next((e for e in reversed(events) if e["event"] in _TURNS), events[-1])
    status = {"finished": "done", "failed": "failed"}.get(turn["event"], "partial")
    error = str(turn.get("error")) if status == "failed" else None
    return {"status": status, "error": error, "step": step if step >= 0 else None}


def _defines(summary: Summary) -> bool:
    """Whether a record says what a study asks for; by its place where it is damaged."""
    return summary.verb == DEFINES or (summary.verb is None and summary.name == "definition")


def _study(folder: Path, found: list[Summary]) -> StudySummary:
    content, error = _study_file(folder / "study.json")
    about = next(({"name": s.study, "key": s.key} for s in found if s.verb == DEFINES), {})
    runs, wanted = [s for s in found if not _defines(s)], content.get("runs")
    return StudySummary(
        name=content.get("name") or about.get("name") or folder.name,
        key=content.get("key") or about.get("key"),
        folder=folder.name,
        counts=dict(Counter(run.status for run in runs)),
        unverified=sum(run.status == "done" and not run.verified for run in runs),
        wanted=len(wanted) if isinstance(wanted, list) else None,
        started=min((s.started for s in found if s.started), default=None),
        updated=max((s.updated for s in found), default=None),
        error=error,
    )


def _study_file(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        found = object_of(path.read_bytes())
    except FileNotFoundError:
        return {}, None
    except OSError:
        found = None
    if found is None or not all(isinstance(found.get(name), str | None) for name in ("name", "key")):
        return {}, f"{path.name} cannot be read"
    return found, None

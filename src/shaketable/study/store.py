"""The store: a folder of runs, and what each of them has come to.

    <store>/<study>/definition/record.jsonl     what a study asks for
    <store>/<study>/runs/<run>/record.jsonl     its runs
    <store>/<run>/record.jsonl                  a run of `train` or `sweep` put there with --out

The records are the truth; there is no list of runs that could disagree with them. A listing reads every line of every record,
so what it calls done has an unbroken chain.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import is_held
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.config import StudyConfig

SCHEMA = "shaketable.status/1"
DEPTH = 3
"""Folders between the store and a run's own: the study's, `runs`, the run's."""
DEFINITION = "definition"
SHOWN = ("status", "step", "steps", "attempts", "error", "updated", "id")


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
    """The last step that the record speaks of."""
    steps: int | None = None
    """The steps that its configuration asks for."""
    attempts: int = 0
    """How often it was begun by a study."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return Path(self.path).name

    @property
    def defines(self) -> bool:
        """Whether the record says what a study asks for and is no run; by its place where it is damaged."""
        return self.verb == "study" or (self.verb is None and self.name == DEFINITION)


@dataclass(frozen=True)
class StudySummary:
    """One study's folder, and how its runs stand."""

    name: str
    folder: str
    """Relative to the store."""
    counts: dict[str, int]
    """Runs by status; a run that has not begun is in none."""
    started: str | None
    updated: float | None


def run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders of all records at and below a folder, in order; what lies inside of a run is not looked at."""
    if (root / FILE).exists() or (root / SEAL).exists():
        yield root
    elif depth:
        try:
            inside = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):  # no store yet, or removed meanwhile
            return
        except OSError as error:
            raise ShaketableError(f"cannot read {root}: {error.strerror or error}") from None
        for name in inside:
            yield from run_folders(root / name, depth - 1)


def summaries(root: Path) -> list[Summary]:
    """Every record in a store or a study's folder, definitions too."""
    return sorted((summary(folder, root) for folder in run_folders(root)), key=lambda found: found.path)


def summary(folder: Path, root: Path) -> Summary:
    """What a record says of its run."""
    path = os.path.relpath(folder, root)
    try:
        updated = next(file.stat().st_mtime for file in (folder / FILE, folder / SEAL) if file.exists())
    except (OSError, StopIteration):
        updated = 0.0
    found = Summary(path, "partial", updated)
    try:
        events = RunRecord(folder, {}).events()
    except ShaketableError as error:
        return replace(found, status="damaged", error=str(error).replace(f"{folder}{os.sep}", ""))
    if not events:
        found = replace(found, error="it ended before its first line was written")
    else:
        facts = _head(events[0])
        if facts is None:
            return replace(found, status="damaged", error="its first line does not say what it is")
        found = replace(found, **facts, **_standing(events))
    if found.status in ("partial", "failed") and RunRecord(folder, {}).busy():
        return replace(found, status="running", error=None)
    return found


def _head(head: dict[str, Any]) -> dict[str, Any] | None:
    """What the first line says of the run; None where it is not what we write."""
    about, config = (part if isinstance(part := head.get(name) or {}, dict) else {} for name in ("about", "config"))
    facts = {name: about.get(name) for name in ("study", "arm", "seed", "key")}
    facts |= {name: head.get(name) for name in ("id", "verb", "started")} | {"steps": config.get("steps")}
    numbers = ("seed", "steps")
    fits = all(isinstance(value, (int if name in numbers else str) | None) for name, value in facts.items())
    return facts if fits else None


def _standing(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the run stands: after the last of its turns, and at the last step."""
    step = next((e["step"] for e in reversed(events) if isinstance(e.get("step"), int)), -1)
    turns = ("attempt", "resumed", "failed", "finished")
    turn = next((e for e in reversed(events) if e["event"] in turns), events[-1])
    status = {"finished": "done", "failed": "failed"}.get(turn["event"], "partial")
    error = str(turn.get("error")) if status == "failed" else None
    attempts = sum(e["event"] == "attempt" for e in events)
    return {"status": status, "error": error, "step": step if step >= 0 else None, "attempts": attempts}


def finished(folder: Path) -> set[tuple[str, str | None]]:
    """Name and key of the runs of a study that need nothing more."""
    return {(found.name, found.key) for found in summaries(folder) if found.status == "done" and not found.defines}


def progress(study: StudyConfig, folder: Path) -> dict[str, Any]:
    """Every run that the study asks for, with its status; and what lies there that it does not ask for."""
    known = {found.name: asdict(found) for found in summaries(folder) if not found.defines}
    rows = []
    for cell in cells_of(study):
        found = known.pop(cell.name, None) or {"status": "missing"}
        if found["status"] != "missing" and found.get("key") not in (None, cell.key):
            found = {"status": "damaged", "error": "it holds another run than its name says"}
        if found["status"] == "missing" and is_held(folder / "runs", cell.name):
            found = {"status": "running"}
        place = {"name": cell.name, "kind": cell.kind, "arm": cell.arm, "seed": cell.seed, "title": cell.title}
        rows.append({**place, **{name: found.get(name) for name in SHOWN}})
    counts = dict(Counter(str(row["status"]) for row in rows))
    complete = counts.get("done", 0) == len(rows)
    facts = {"study": study.study, "folder": str(folder), "complete": complete, "counts": counts}
    return {"schema": SCHEMA, **facts, "runs": rows, "others": sorted(known)}


def listed(store: Path) -> dict[str, Any]:
    """The studies of a store and every run in it."""
    by_folder: dict[str, list[Summary]] = {}
    found = summaries(store)
    for one in found:
        by_folder.setdefault(Path(one.path).parts[0], []).append(one)
    studies = [
        _study(name, inside)
        for name, inside in by_folder.items()
        if any(one.defines or len(Path(one.path).parts) > 2 for one in inside)
    ]
    runs = [asdict(one) for one in found if not one.defines]
    return {"schema": SCHEMA, "store": str(store), "studies": [asdict(study) for study in studies], "runs": runs}


def _study(folder: str, found: list[Summary]) -> StudySummary:
    name = next((one.study for one in found if one.defines and one.study), folder)
    counts = dict(Counter(one.status for one in found if not one.defines))
    started = min((one.started for one in found if one.started), default=None)
    return StudySummary(name, folder, counts, started, max(one.updated for one in found))

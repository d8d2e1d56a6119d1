"""Checkpoints that a kill cannot spoil.

TRL writes `checkpoint-N` file by file. Only when all of it is there does `seal` write `shaketable.json` into it, by renaming
a finished file: a folder without the seal was cut off and is never resumed from. The seal carries the ledgers up to that step,
and the counters that decide which fires are measured next.

Once a checkpoint is sealed, the record of its run has the SHA-256 of each of its files. What the record does not know
is not resumed from, and what is not as it was saved is refused before anything of it is opened: Transformers keeps optimizer
and random states in pickles. Older checkpoints go only after a newer one is sealed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shaketable.errors import ShaketableError
from shaketable.io.replacing import replacing, sync
from shaketable.records.record import RunRecord

SEAL = "shaketable.json"
KEEP = 2


@contextmanager
def writing(what: str, out: Path) -> Iterator[None]:
    """Turn a failed write in the run folder `out` into one line that says how to resume."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, ShaketableError):
            raise
        why = error.strerror if isinstance(error, OSError) else None
        why = why or (str(error).splitlines() or [type(error).__name__])[0]
        hint = f"what was saved before is kept; free some space and resume with --resume {out}"
        raise ShaketableError(f"cannot write {what} in {out}: {why}; {hint}") from error


def seal(folder: Path, content: dict[str, Any]) -> None:
    """Declare a checkpoint whole."""
    with replacing(folder / SEAL) as draft:
        draft.write_text(json.dumps(content), encoding="utf-8")
        for path in folder.iterdir():
            if path.is_file():
                sync(path)


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def newest(record: RunRecord) -> Path | None:
    """The newest whole checkpoint that a record knows; raises unless it is what was saved."""
    known = {event["step"]: event["files"] for event in record.events("checkpoint")}
    folders = [folder for folder in sealed(record.folder) if step_of(folder) in known]
    if not folders:
        return None
    check(folders[-1], known[step_of(folders[-1])])
    return folders[-1]


def made_of(record: RunRecord, now: dict[str, str]) -> dict[str, Any] | None:
    """The ingredients of a run, by its record; None for a new one. Refuses other problems or weights than it began with."""
    known = next(iter(record.events("made_of")), None)
    for what, content in now.items():
        if known is not None and known.get(what, content) != content:
            raise ShaketableError(f"the {what} have changed since the run in {record.folder} began; start a new run")
    return known


def check(folder: Path, files: dict[str, str]) -> None:
    """Raise unless a checkpoint is what was saved."""
    now = hashes(folder)
    if names := sorted(name for name in {*files, *now} if files.get(name) != now.get(name)):
        fate = "put there" if names[0] not in files else "changed" if names[0] in now else "removed"
        raise ShaketableError(
            f"{folder} is not what this run saved: {names[0]} was {fate}; "
            "move the folder away to resume from an earlier checkpoint, or from the start"
        )


def sealed(out: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((p for p in _checkpoints(out) if (p / SEAL).is_file()), key=step_of)


def _checkpoints(out: Path) -> list[Path]:
    """Folders named checkpoint-N; others, such as a broken one that was renamed, are ignored."""
    return [p for p in out.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]


def step_of(folder: Path) -> int:
    """The step that a checkpoint was taken after."""
    return int(folder.name.rpartition("-")[2])


def content(folder: Path) -> dict[str, Any]:
    """What the seal carries."""
    found: dict[str, Any] = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    return found


def drop_old(out: Path) -> None:
    """Remove all but the newest whole checkpoints, and those that were cut off before them."""
    whole = sealed(out)
    if not whole:
        return
    newest = step_of(whole[-1])
    for folder in _checkpoints(out):
        cut_off = not (folder / SEAL).is_file() and step_of(folder) < newest
        if cut_off or folder in whole[:-KEEP]:
            shutil.rmtree(folder)

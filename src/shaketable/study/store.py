"""The store: what was asked of each study, its runs, and digests to compare them with.

    <store>/<study>/definition/record.jsonl     every version of what a study asks for, with its time
    <store>/<study>/runs/<run>/record.jsonl     its runs
    <store>/<run>/record.jsonl                  a run of `train` or `sweep` put there with --out

The records are the only truth; there is no index that could disagree with them. A listing reads every line of every record, so
a run that it calls done has an unbroken chain.

The definition is an append-only, chained record too. Each version says whether there were results by then, because clocks can
be set: so a report can tell whether the comparison that decides was named before the first run had ended.

The digest of a study is the SHA-256 of what `sha256sum` prints for its records, so anybody can take it without Shaketable:

    cd STORE/STUDY && find * -name record.jsonl | LC_ALL=C sort | xargs sha256sum | sha256sum

Published or signed when a study has ended, it shows every later change: a new chain, a run that was added, left out or done
again. `asked` is the digest of the definition alone; it is known before the first run (`--dry-run` prints it).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import held
from shaketable.records.record import FILE, SEAL, RunRecord, is_begun
from shaketable.study.cells import cells_of
from shaketable.study.config import StudyConfig
from shaketable.study.file import parse_study
from shaketable.study.runs import Run

STATUS_SCHEMA = "shaketable.status/1"
VERIFY_SCHEMA = "shaketable.verify/2"
DEPTH = 3
"""Folders between the store and a run's own: the study's, `runs`, the run's."""
DEFINITION = "definition"
NEWER = ("harden", "after", "elsewhere", "skip_layers")
"""Keys of an arm that older definitions do not have: written only where they say something."""
NEWER_OF_GUIDES = {"unit": "relative", "order": "after"}
"""The same for the keys of a guide, with the value that older versions had."""


# ---- what was asked for


def define(study: StudyConfig, store: Path) -> None:
    """Append the study to its definition, unless it is the last version there."""
    folder, config = store / study.study, described(study)
    _check_writable(folder)
    with held(folder, DEFINITION, wait=30.0) as ours:
        if not ours:
            raise ShaketableError(f"another process keeps {folder} for itself; try again")
        if is_begun(folder / DEFINITION):
            record = RunRecord.open(folder / DEFINITION, "study")
        else:
            from shaketable.records.environment import gather

            record = RunRecord.create(folder / DEFINITION, "study", config, gather(), about={"study": study.study})
        versions = record.events("defined")  # none, where the process was killed after the first line
        if not versions or versions[-1]["config"] != config:
            late = any(one.status == "done" and not one.defines for one in summaries(folder))
            record.append("defined", config=config, after_results=late)


def described(study: StudyConfig) -> dict[str, Any]:
    """A study as its definition holds it."""
    found = study.model_dump(mode="json", exclude={"engine": {"workers", "address", "kind", "retries"}})
    for name, arm in found["arms"].items():
        found["arms"][name] = arm = {k: v for k, v in arm.items() if k not in NEWER or v not in (None, False, [])}
        if isinstance(arm["aqn"], dict):
            arm["aqn"] = {k: v for k, v in arm["aqn"].items() if k not in NEWER_OF_GUIDES or v != NEWER_OF_GUIDES[k]}
    if not study.evaluate.loss:
        del found["evaluate"]["loss"]
    if not study.diagnose.conditions:
        del found["diagnose"]["conditions"]
    if not study.report.steps:
        del found["report"]
    if not study.harden:
        del found["harden"]
    return found


def definitions(folder: Path) -> list[dict[str, Any]]:
    """Every version of a study, oldest first: `config`, `time`, and whether it came `after_results` (not in old ones)."""
    if not (folder / DEFINITION / FILE).is_file():
        raise ShaketableError(f"there is no study in {folder}: it has no {DEFINITION}/{FILE}")
    found = RunRecord.open(folder / DEFINITION, "study").events("defined")
    if not found:
        raise ShaketableError(f"there is no study in {folder} yet: it was stopped before it was written down; run it again")
    return found


def last_defined(folder: Path) -> StudyConfig:
    """The study of a folder, as it was run last."""
    return parse_study(definitions(folder)[-1]["config"], str(folder))


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ShaketableError(f"cannot write in the store {folder}: {error.strerror or error}") from None


# ---- what is there


@dataclass(frozen=True)
class Summary:
    """One record of a store, as `study list --json` shows it."""

    path: str
    """The run's folder, relative to the store."""
    status: str
    updated: float
    error: str | None
    id: str | None
    verb: str | None
    study: str | None
    arm: str | None
    seed: int | None
    key: str | None
    started: str | None
    step: int | None
    steps: int | None
    attempts: int

    @property
    def defines(self) -> bool:
        """Whether the record says what a study asks for and is no run; by its place where it is damaged."""
        return self.verb == "study" or (self.verb is None and Path(self.path).name == DEFINITION)


def summaries(root: Path) -> list[Summary]:
    """Every record in a store or a study's folder, definitions too."""
    return sorted((_summary(folder, root) for folder in _run_folders(root)), key=lambda found: found.path)


def _summary(folder: Path, root: Path) -> Summary:
    run = Run.read(folder)
    return Summary(
        path=os.path.relpath(folder, root),
        status=run.status,
        updated=run.updated,
        error=run.error and run.error.replace(f"{folder}{os.sep}", ""),
        **{name: run.head.get(name) for name in ("id", "verb", "started")},
        **{name: run.about.get(name) for name in ("study", "arm", "seed", "key")},
        step=run.step,
        steps=run.steps,
        attempts=run.attempts,
    )


def _run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders of all records at and below a folder; those inside of a run are left out."""
    if (root / FILE).exists() or (root / SEAL).exists():
        yield root
    elif depth:
        try:
            inside = [entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):  # no store yet, or removed meanwhile
            return
        except OSError as error:
            raise ShaketableError(f"cannot read {root}: {error.strerror or error}") from None
        for name in inside:
            yield from _run_folders(root / name, depth - 1)


def progress(study: StudyConfig, folder: Path) -> dict[str, Any]:
    """Every run that the study asks for, with its status; and the names of other runs in its folder."""
    cells, rows = cells_of(study), []
    for cell in cells:
        run = Run.of(cell, folder / "runs")
        place = {"name": cell.name, "kind": cell.kind, "arm": cell.arm, "seed": cell.seed, "title": cell.title}
        state = {"status": run.status, "step": run.step, "steps": run.steps, "attempts": run.attempts, "error": run.error}
        rows.append({**place, **state, "updated": run.updated or None, "id": run.head.get("id")})
    counts = dict(Counter(str(row["status"]) for row in rows))
    others = {found.name for found in _run_folders(folder)} - {cell.name for cell in cells} - {DEFINITION}
    complete = counts.get("done", 0) == len(rows)
    facts: dict[str, Any] = {"study": study.study, "folder": str(folder), "complete": complete, "counts": counts}
    return {"schema": STATUS_SCHEMA, **facts, "runs": rows, "others": sorted(others)}


def listed(store: Path) -> dict[str, Any]:
    """The studies of a store with the counts of their runs by status, and every run in it."""
    by_folder: dict[str, list[Summary]] = {}
    found = summaries(store)
    for one in found:
        by_folder.setdefault(Path(one.path).parts[0], []).append(one)
    studies = [
        {
            "name": next((one.study for one in inside if one.defines and one.study), folder),
            "folder": folder,
            "counts": dict(Counter(one.status for one in inside if not one.defines)),
            "started": min((one.started for one in inside if one.started), default=None),
            "updated": max(one.updated for one in inside),
        }
        for folder, inside in by_folder.items()
        if any(one.defines or len(Path(one.path).parts) > 2 for one in inside)
    ]
    runs = [asdict(one) for one in found if not one.defines]
    return {"schema": STATUS_SCHEMA, "store": str(store), "studies": studies, "runs": runs}


# ---- whether it is what was written


def verify(root: Path) -> dict[str, Any]:
    """Every record of a store, or of a study's folder, with what is wrong with it; and the digests of its studies."""
    found = summaries(root)
    if not found:
        raise ShaketableError(f"there is no record in {root}")
    records = [
        {"path": one.path, "status": one.status, "problem": one.error if one.status == "damaged" else None} for one in found
    ]
    studies = []
    for folder in ((root / one.path).parent for one in found if one.defines):
        try:
            asked = asked_digest(definitions(folder)[-1]["config"])
        except (ShaketableError, LookupError):
            asked = None
        name = os.path.relpath(folder, root)
        name = folder.resolve().name if name == "." else name
        studies.append({"study": name, "digest": digest(folder), "asked": asked})
    bad = sum(record["problem"] is not None for record in records)
    return {"schema": VERIFY_SCHEMA, "store": str(root), "records": records, "bad": bad, "studies": studies}


def digest(folder: Path) -> str:
    """Of all records of a study, also those of a run within a run, in the order in which `find` and `sort` have them."""
    found = (os.path.relpath(file, folder) for file in folder.rglob(FILE) if file.is_file())
    paths = sorted((path for path in found if not path.startswith(".")), key=os.fsencode)
    lines = (f"{hashlib.sha256((folder / path).read_bytes()).hexdigest()}  {path}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def asked_digest(study: StudyConfig | dict[str, Any]) -> str:
    """Of what a study asks for, as its definition holds it."""
    content = described(study) if isinstance(study, StudyConfig) else study
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

"""The store: what was asked of each study, its runs, and digests to compare them with.

    <store>/<study>/definition/record.jsonl     every version of what a study asks for, with its time
    <store>/<study>/runs/<run>/record.jsonl     its runs
    <store>/<run>/record.jsonl                  a run of `train` or `sweep` put there with --out

The records are the only truth; there is no index that could disagree with them. The definition is an append-only, chained
record too. Each version says whether there were results by then, because clocks can be set.

The digest of a study is the SHA-256 of what `sha256sum` prints for its records, so anybody can take it without Shaketable
(docs/studies.md). `asked` is the digest of the definition alone; it is known before the first run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import held
from shaketable.records.record import FILE, SEAL, RunRecord, is_begun
from shaketable.study.analysis.results import RunFacts
from shaketable.study.cells import cells_of
from shaketable.study.config import StudyConfig
from shaketable.study.file import parse_study
from shaketable.study.runs import Run

STATUS_SCHEMA = "shaketable.status/1"
VERIFY_SCHEMA = "shaketable.verify/2"
DEPTH = 3
"""Folders between the store and a run's own: the study's, `runs`, the run's."""
DEFINITION = "definition"


# ---- what was asked for


def define(study: StudyConfig, store: Path) -> None:
    """Append the study to its definition, unless it is the last version there."""
    folder, config = store / study.study, described(study)
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
            late = any(one.status == "done" and not defines(one) for one in summaries(folder))
            record.append("defined", config=config, after_results=late)


def described(study: StudyConfig) -> dict[str, Any]:
    return study.model_dump(mode="json", exclude={"engine": {"workers", "kind", "retries"}})


def definitions(folder: Path) -> list[dict[str, Any]]:
    """Every version of a study, oldest first: `config`, `time`, and whether it came `after_results` (not in old ones)."""
    if not (folder / DEFINITION / FILE).is_file():
        raise ShaketableError(f"there is no study in {folder}: it has no {DEFINITION}/{FILE}")
    found = RunRecord.open(folder / DEFINITION, "study").events("defined")
    if not found:
        raise ShaketableError(f"there is no study in {folder} yet: it was stopped before it was written down; run it again")
    return found


def last_defined(folder: Path) -> StudyConfig:
    return parse_study(definitions(folder)[-1]["config"], str(folder))


# ---- what is there


def summaries(root: Path) -> list[RunFacts]:
    """Every record in a store or a study's folder, definitions too; folders are relative to it."""
    found = []
    for folder in _run_folders(root):
        facts = Run.read(folder).facts(os.path.relpath(folder, root))
        short = facts.error and facts.error.replace(f"{folder}{os.sep}", "")
        found.append(facts.model_copy(update={"error": short}))
    return sorted(found, key=lambda one: one.folder)


def defines(one: RunFacts) -> bool:
    """Whether a record says what a study asks for and is no run; by its place where it is damaged."""
    return one.kind == "study" or (not one.kind and Path(one.folder).name == DEFINITION)


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
    cells = cells_of(study)
    runs = [Run.of(cell, folder / "runs").facts(f"runs/{cell.name}") for cell in cells]
    others = {found.name for found in _run_folders(folder)} - {cell.name for cell in cells} - {DEFINITION}
    return {
        "schema": STATUS_SCHEMA,
        "study": study.study,
        "folder": str(folder),
        "complete": all(run.status == "done" for run in runs),
        "counts": dict(Counter(run.status for run in runs)),
        "runs": [{"title": cell.title, **run.model_dump(mode="json")} for cell, run in zip(cells, runs, strict=True)],
        "others": sorted(others),
    }


def listed(store: Path) -> dict[str, Any]:
    """The studies of a store, with the counts of their runs by status."""
    by_folder: dict[str, list[RunFacts]] = {}
    for one in summaries(store):
        by_folder.setdefault(Path(one.folder).parts[0], []).append(one)
    studies = [
        {
            "name": folder,
            "counts": dict(Counter(one.status for one in inside if not defines(one))),
            "updated": max(one.updated or 0.0 for one in inside),
        }
        for folder, inside in by_folder.items()
        if any(len(Path(one.folder).parts) > 1 for one in inside)
    ]
    return {"schema": STATUS_SCHEMA, "store": str(store), "studies": studies}


# ---- whether it is what was written


def verify(root: Path) -> dict[str, Any]:
    """Every record of a store, or of a study's folder, with what is wrong with it; and the digests of its studies."""
    found = summaries(root)
    if not found:
        raise ShaketableError(f"there is no record in {root}")
    records = [
        {"path": one.folder, "status": one.status, "problem": one.error if one.status == "damaged" else None} for one in found
    ]
    studies = []
    for folder in ((root / one.folder).parent for one in found if defines(one)):
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

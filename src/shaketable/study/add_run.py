"""Bringing a run that was made elsewhere into a study: read, checked, then written as a record like all others.

The record is made in a folder beside the runs and moved to its place when it is whole: whoever looks sees all of it or nothing,
and what cannot be read changes nothing. It is chained and sealed from now on. What it cannot vouch for is the time before; so
its `added` event says where the run came from, when it had ended, and the SHA-256 of every file that was read, and the report
names each such run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError, nearest
from shaketable.io.locks import held
from shaketable.records.record import RunRecord
from shaketable.study.analysis.runs import Run
from shaketable.study.cells import Cell, cells_of
from shaketable.study.config import StudyConfig
from shaketable.study.foreign_runs import ForeignRun, read_run
from shaketable.study.run_study import define


def add_run(
    study: StudyConfig,
    store: Path,
    folder: Path,
    *,
    arm: str,
    seed: int,
    scores: Mapping[str, Path],
    metrics: Path | None = None,
) -> Cell:
    """Add the run in a folder as one arm and seed of a study; the cell that it became.

    Raises:
        ShaketableError: It is another run than the arm's, not whole, there already, or was scored on other problems.
    """
    cell = _cell(study, arm, seed)
    found = read_run(folder, cell, scores, metrics)
    define(study, store)
    runs = store / study.study / "runs"
    with held(runs, cell.name) as ours:
        if not ours or (runs / cell.name).exists():
            raise ShaketableError(f"{cell.title} is there already, in {runs / cell.name}; nothing is overwritten")
        _check_problems(found, [Run.of(other, runs) for other in cells_of(study)], folder)
        _write(found, cell, study.study, runs, folder)
    return cell


def _cell(study: StudyConfig, arm: str, seed: int) -> Cell:
    if arm not in study.arms:
        raise ShaketableError(f"{study.study} has no arm {arm!r}; {nearest(arm, study.arms)}")
    if not study.arms[arm].elsewhere:
        raise ShaketableError(f"the runs of {arm} are done by `study run`; write elsewhere: true in the arm to add them")
    if seed not in study.seeds:
        raise ShaketableError(f"{study.study} has no seed {seed}; its seeds are {', '.join(map(str, study.seeds))}")
    return next(cell for cell in cells_of(study) if (cell.arm, cell.seed) == (arm, seed))


def _check_problems(found: ForeignRun, runs: list[Run], folder: Path) -> None:
    """Scores on other problems than those of runs that are there could not be paired with them."""
    mine = _tests(found.events)
    for run in runs:
        theirs = run.last("made_of") if run.is_done and run.config.get("task") == found.config["task"] else None
        if theirs is not None and mine is not None and theirs.get("tests", mine) != mine:
            raise ShaketableError(f"{folder} was scored on other problems than {run.name}; they cannot be compared")


def _tests(events: list[tuple[str, dict[str, Any]]]) -> str | None:
    return next((body.get("tests") for kind, body in events if kind == "made_of"), None)


def _write(found: ForeignRun, cell: Cell, study: str, runs: Path, folder: Path) -> None:
    draft = runs / f".adding-{cell.name}"
    if draft.exists():
        shutil.rmtree(draft)
    record = RunRecord.create(draft, "added", found.config, found.environment, about=cell.about(study))
    facts = {"how": found.how, "path": str(folder), "files": found.files, "ended": found.ended, "ledger": found.proven}
    record.append("added", **facts, on=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    for kind, body in found.events:
        record.append(kind, **body)
    last = max((body["step"] for kind, body in found.events if kind == "step"), default=0)
    record.append("finished", step=last, ledgers=found.ledgers)
    draft.rename(runs / cell.name)

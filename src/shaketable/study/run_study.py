"""A study in its store: what was asked for, and when; then the runs, by whichever engine.

    <store>/<study>/definition/record.jsonl     every version of the study, with its time
    <store>/<study>/runs/<run>/record.jsonl     the runs

The definition is a record like that of a run: chained and append-only. So a report can tell whether the comparison that decides
was named before the first run had ended, or after: each version says whether there were results by then, because clocks can be
set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import held
from shaketable.records.record import FILE, RunRecord
from shaketable.study.cells import Cell, own_cells
from shaketable.study.config import StudyConfig
from shaketable.study.execute import Ended, Watch, execute, slots
from shaketable.study.file import parse_study
from shaketable.study.run_cell import is_begun
from shaketable.study.store import DEFINITION
from shaketable.study.store import finished as done_runs

DEFAULT_STORE = Path("shaketable-runs")
NEWER = ("harden", "after", "elsewhere", "skip_layers")
"""Keys of an arm that older definitions do not have: written only where they say something."""
NEWER_OF_GUIDES = {"unit": "relative", "order": "after"}
"""The same for the keys of a guide, with what was done before there were such keys."""


def run_study(study: StudyConfig, store: Path, watch: Watch) -> Ended:
    """Do what is missing of a study, which `check` has looked at; how each run ended."""
    folder = store / study.study
    define(study, store)
    cells = own_cells(study)
    return execute(study, cells, finished(folder, cells), folder, watch)


def finished(folder: Path, cells: list[Cell]) -> set[str]:
    """Names of the runs that need nothing more."""
    done = done_runs(folder)
    return {cell.name for cell in cells if (cell.name, cell.key) in done}


def check(study: StudyConfig) -> None:
    """Whatever can be known before the first run: the device, and every arm's model, task, plan and AQN, once."""
    from shaketable.harden.config import HardenConfig
    from shaketable.harden.scoring import rehearse as check_hardening
    from shaketable.models import check_device
    from shaketable.study.scoring import check_scoring
    from shaketable.train.config import TrainConfig
    from shaketable.train.plans import rehearse

    if study.engine.kind == "local":
        check_device(study.device)
        slots(study, 1)
    first: dict[str | None, Cell] = {}
    for cell in own_cells(study):
        if cell.kind != "locate":
            first.setdefault(cell.arm, cell)
    for cell in first.values():
        try:
            if cell.kind == "train":
                rehearse(TrainConfig.checked(**cell.config))
            elif cell.kind == "harden":
                check_hardening(HardenConfig.checked(**cell.config))
            else:
                check_scoring(cell.config)
        except ShaketableError as error:
            raise ShaketableError(f"arm {cell.arm!r}: {error}") from None


def define(study: StudyConfig, store: Path) -> None:
    """Write down what is asked for, unless it is what was asked for last."""
    folder = store / study.study
    _check_writable(folder)
    config = described(study)
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
            late = bool(done_runs(folder))
            record.append("defined", config=config, after_results=late)


def described(study: StudyConfig) -> dict[str, Any]:
    """A study as its definition holds it."""
    found = study.model_dump(mode="json", exclude={"engine": {"workers", "address", "kind", "retries"}})
    arms = {
        name: {k: v for k, v in arm.items() if k not in NEWER or v not in (None, False, [])}
        for name, arm in found["arms"].items()
    }
    for guide in (arm["aqn"] for arm in arms.values() if isinstance(arm["aqn"], dict)):
        for key in [k for k in NEWER_OF_GUIDES if guide[k] == NEWER_OF_GUIDES[k]]:
            del guide[key]
    if not study.evaluate.loss:
        del found["evaluate"]["loss"]
    if not study.diagnose.conditions:
        del found["diagnose"]["conditions"]
    if not study.report.steps:
        del found["report"]
    return {k: v for k, v in found.items() if k != "harden" or v} | {"arms": arms}


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

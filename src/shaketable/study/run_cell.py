"""Doing one run of a study, in whatever process it is given to.

    lock → record (new, or the one that was begun) → attempt → work → finished, or failed with the reason

A run that another process works on is left to it. One that was killed goes on where it was. Everything that a run needs is in
its cell and, for a guided arm, in the record of its diagnosis, so that any process on any machine that sees the store can
do it: a worker of this computer or a Ray task.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from shaketable.errors import ShaketableError
from shaketable.io.locks import held
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import Cell

Tell = Callable[[str, dict[str, Any]], None]
Ending = Literal["done", "busy"]


def do(cell: Cell, study: str, runs: Path, engine: str, tell: Tell | None = None) -> Ending:
    """Do a run, or what is missing of it.

    Raises:
        ShaketableError: The run cannot be done as it was asked for; its record says so too.
    """
    with held(runs, cell.name) as ours:
        if not ours:
            return "busy"
        folder = runs / cell.name
        begun = is_begun(folder)
        config = cell.config if begun else _filled_in(cell, runs)
        record = opened(cell, folder) if begun else _new(cell, study, folder, config)
        if record.events("finished"):
            record.seal()
            return "done"
        with record.alone():
            _attempt(cell, record, engine, begun, tell or (lambda kind, facts: None))
        return "done"


def opened(cell: Cell, folder: Path) -> RunRecord:
    """The record of a cell's run; refuses one that was put there and is of another run."""
    record = RunRecord.open(folder, cell.kind)
    if record.head.get("about", {}).get("key") != cell.key:
        raise ShaketableError(f"{folder} holds another run than its name says; move it away")
    return record


def is_begun(folder: Path) -> bool:
    """Whether there is a record to go on with. A kill before its first line was whole leaves nothing worth keeping."""
    if (folder / SEAL).exists():
        return True
    if not (folder / FILE).is_file() or b"\n" not in (folder / FILE).read_bytes()[: 1 << 20]:
        if folder.exists():
            shutil.rmtree(folder)
        return False
    return True


def _new(cell: Cell, study: str, folder: Path, config: dict[str, Any]) -> RunRecord:
    from shaketable.records.environment import gather

    return RunRecord.create(folder, cell.kind, config, gather(), about=cell.about(study))


def _filled_in(cell: Cell, runs: Path) -> dict[str, Any]:
    """The configuration with what the run before it gives: the AQN of a diagnosis, or a hardened model."""
    if cell.guide is None:
        return cell.config if cell.needs is None else {**cell.config, "model": str(runs / cell.needs / "model")}
    from shaketable.aqn.guidance import Guidance

    guide = dict(cell.guide)
    found = RunRecord.open(runs / str(cell.needs), "locate").events("diagnosis")[-1]["diagnosis"]
    guidance = Guidance.of(found, base_sigma=guide["sigma"], schedule=guide["schedule"], target=guide["guide"])
    steady = {"schedule": f"constant:{guide['sigma']!r}"} if cell.kind == "evaluate" else {}
    asked = {key: guide[key] for key in ("form", "where", "unit", "order")}
    return {**cell.config, "aqn": guidance.aqn(**asked, **steady).text()}


def _attempt(cell: Cell, record: RunRecord, engine: str, begun: bool, tell: Tell) -> None:
    number = 1 + len(record.events("attempt"))
    record.append("attempt", number=number, pid=os.getpid(), engine=engine)
    try:
        _KINDS[cell.kind](record, begun, tell)
    except BaseException as error:
        text = str(error) if isinstance(error, ShaketableError) else f"{type(error).__name__}: {error}"
        if not record.events("finished"):
            record.append("failed", error=text[:2000], exit=1, final=isinstance(error, ShaketableError))
        raise
    if cell.kind in ("train", "harden"):
        _tidy(record.folder, cell.keep_weights)


def _train(record: RunRecord, begun: bool, tell: Tell) -> None:
    from shaketable.train.config import TrainConfig
    from shaketable.train.run import Training

    Training(TrainConfig.checked(**record.config), record, tell).run(resume=begun)


def _harden(record: RunRecord, begun: bool, tell: Tell) -> None:
    from shaketable.harden.config import HardenConfig
    from shaketable.harden.run import Hardening

    Hardening(HardenConfig.checked(**record.config), record, tell).run(resume=begun)


def _tidy(folder: Path, keep_weights: bool) -> None:
    """Remove the checkpoints of a finished run, and its weights unless they are kept; also those of a run within it."""
    for checkpoint in list(folder.rglob("checkpoint-*")):
        shutil.rmtree(checkpoint)
    for weights in () if keep_weights else {file.parent for file in folder.rglob("*.safetensors")}:
        shutil.rmtree(weights)


def _evaluate(record: RunRecord, begun: bool, tell: Tell) -> None:
    from shaketable.study.scoring import score

    score(record, tell)


def _locate(record: RunRecord, begun: bool, tell: Tell) -> None:
    import torch

    from shaketable.locate.locate import locate
    from shaketable.models import load_model
    from shaketable.plan import Plan
    from shaketable.records.weight_hash import weights_hash

    config = record.config
    tell("stage", {"text": f"loading {config['model']}"})
    model, tokenizer = load_model(config["model"], device=config["device"], dtype=getattr(torch, config["dtype"]))
    if not record.events("made_of"):
        name = "weights" if config["dtype"] == "float32" else f"weights_{config['dtype']}"
        record.append("made_of", **{name: weights_hash(model)})
    diagnosis = locate(
        model,
        tokenizer,
        mode=config["mode"],
        tokens=config["tokens"],
        source=config["model"],
        plan=Plan.parse(config["plan"], seed=config["seed"]),
        seed=config["seed"],
        progress=lambda done, total, text: tell("stage", {"text": text, "done": done, "total": total}),
    )
    record.append("diagnosis", diagnosis=diagnosis.as_dict())
    record.append("finished")


_KINDS: dict[str, Callable[[RunRecord, bool, Tell], None]] = {
    "train": _train,
    "harden": _harden,
    "evaluate": _evaluate,
    "locate": _locate,
}

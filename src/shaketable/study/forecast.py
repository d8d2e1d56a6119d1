"""Before a study: whether it can run, whether there is anything to measure, roughly how long it takes, and what it can show.

A model that solves none of the problems without a fault has no reward to learn from and nothing that a fault could take: such a
study is refused before its first run. The time follows from that rehearsal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.evaluate.statistics import planned_detectable
from shaketable.evaluate.tasks import code_in
from shaketable.harden.config import HardenConfig
from shaketable.study.cells import Cell, own_cells
from shaketable.study.config import StudyConfig
from shaketable.study.execute import finished, slots
from shaketable.train.config import TrainConfig

SCHEMA = "shaketable.forecast/2"
LOADING = 5.0
"""Seconds that a run takes beside steps and scores; a guess, small beside both."""
REHEARSED = 32
"""Problems that a model must solve one of."""
TRAINED_ON, FAULTY = 5.0, 1.6
"""How much longer than to score a problem it takes to train on one answer, and to score a problem under a fault: medians
over the arms of the published CPU studies."""


@dataclass(frozen=True)
class Forecast:
    cells: list[Cell]
    left: list[Cell]
    """The runs that are not done yet."""
    seconds: float | None
    """None where no model could be rehearsed."""
    workers: int
    """Runs at a time; on Ray as many as fit when 0."""
    can_show: str

    def to_dict(self) -> dict[str, Any]:
        rows = [{"name": c.name, "arm": c.arm, "seed": c.seed, "kind": c.kind, "to_do": c in self.left} for c in self.cells]
        return {"schema": SCHEMA, "runs": rows, "seconds": self.seconds, "workers": self.workers, "can_show": self.can_show}


def forecast(study: StudyConfig, folder: Path) -> Forecast:
    """Look at what is there, and estimate the rest."""
    import torch

    torch.set_num_threads(study.engine.threads)
    cells = own_cells(study)
    done = finished(cells, folder)
    left = [cell for cell in cells if cell.name not in done]
    problem = rehearse_scores(study, cells)
    count = len(slots(study, max(1, len(left)))) if study.engine.kind == "local" else study.engine.workers
    seconds = None if problem is None else sum(_seconds(cell, problem) for cell in left) / count
    return Forecast(cells, left, seconds, count, can_show(study))


# ---- whether it can run


def check(study: StudyConfig) -> None:
    """Check whatever can be known before the first run: the device, and every arm's model, task, plan and AQN, once."""
    from shaketable.harden.scoring import rehearse as check_hardening
    from shaketable.models import check_device
    from shaketable.study.run_cell import check_scoring
    from shaketable.train.plans import rehearse

    if study.engine.kind == "local":
        check_device(study.device)
        slots(study, 1)
    first = {cell.arm: cell for cell in reversed(own_cells(study)) if cell.arm is not None}
    for arm in (name for name in study.arms if name in first):
        cell = first[arm]
        try:
            if cell.kind == "train":
                rehearse(TrainConfig.checked(**cell.config))
            elif cell.kind == "harden":
                check_hardening(HardenConfig.checked(**cell.config))
            else:
                check_scoring(cell.config)
        except ShaketableError as error:
            raise ShaketableError(f"arm {arm!r}: {error}") from None


def check_scores(study: StudyConfig, folder: Path) -> None:
    """Refuse a study in which a model that learns solves no problem of its task, unless it has a finished run."""
    cells = own_cells(study)
    if not finished(cells, folder):
        rehearse_scores(study, [cell for cell in cells if _learns(cell)])


def _learns(cell: Cell) -> bool:
    return cell.kind in ("train", "harden") and not cell.config["warm_start"]


def rehearse_scores(study: StudyConfig, cells: Sequence[Cell]) -> float | None:
    """Score each model on a few problems of its task; the seconds that a problem takes the slowest of them.

    Tasks that are Python code are not tried here but by the runs, whose processes may die of it; and where runs are done on a
    cluster, this machine may not have their device.
    """
    if study.engine.kind != "local":
        return None
    slowest = None
    learning = {(c.config["model"], c.config["task"]): c.arm for c in reversed(cells) if _learns(c)}
    for model, task in dict.fromkeys((c.config["model"], c.config["task"]) for c in cells if c.arm is not None):
        if code_in(task) is not None:
            continue
        solved, count, seconds = _rehearsed(study, model, task)
        if solved == 0 and (model, task) in learning:
            what = f"{model} solves 0 of {count} problems of {task} without a fault"
            why = "there is no reward to learn from, and nothing for a fault to take"
            advice = "allow longer answers, or set train.warm_start"
            raise ShaketableError(f"arm {learning[model, task]!r}: {what}: {why}; {advice}")
        slowest = max(slowest or 0.0, seconds / count)
    return slowest


def _rehearsed(study: StudyConfig, model_name: str, task_line: str) -> tuple[int | None, int, float]:
    """How many of a few problems the model solves (None for a task without answers), of how many, and in how many seconds."""
    import torch

    from shaketable.evaluate.score import Condition, Evaluator, arithmetic
    from shaketable.evaluate.tasks import draw, load_task
    from shaketable.models import load_model

    task = load_task(task_line)
    tests = draw(task, min(REHEARSED, len(task.problems("test"))), study.evaluate.seed)
    model, tokenizer = load_model(model_name, device=study.device, dtype=torch.float32)
    with arithmetic(study.device, study.resolved_dtype):
        found = Evaluator(model, tokenizer, task, tests, REHEARSED).score(Condition("clean"))
    solved = sum(answer.correct > 0 for answer in found.answers) if task.kind == "generate" else None
    return solved, len(tests), found.seconds


# ---- how long it takes, and what it can show


def _seconds(cell: Cell, problem: float) -> float:
    """How long a run takes, from the seconds of scoring a problem without a fault."""
    if cell.kind == "locate":
        return 3 * LOADING
    answers, scores = 0, 1
    if cell.kind == "train":
        config = TrainConfig.checked(**cell.config)
        answers = config.steps * config.prompts * config.samples
        scores = sum(config.evaluates_at(step) for step in range(config.steps + 1))
    elif cell.kind == "harden":
        repairs = len(cell.config["rungs"])
        answers, scores = cell.config["steps"] * cell.config["batch"] * repairs, 1 + repairs
    conditions = 1 + FAULTY * len(cell.config["conditions"])
    return LOADING + problem * (TRAINED_ON * answers + scores * int(cell.config["eval_n"]) * conditions)


def can_show(study: StudyConfig) -> str:
    """The difference in accuracy that this study can show, if the arms differ as `planned_detectable` assumes."""
    seeds, n = len(study.seeds), study.evaluate.n
    if seeds < 2:
        return "fewer than two seeds conclude nothing about a recipe; better five"
    size = planned_detectable(n, seeds)
    what = "no difference" if size is None else f"a difference of about {100 * size:.1f} points with 80 % power"
    return f"{seeds} seeds × {n} problems can show {what}; the report computes it from the measured spread"

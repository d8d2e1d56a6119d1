"""Before a study: whether it can run, whether there is anything to measure, how long it takes, and what difference it can show.

A model that solves none of the problems without a fault has no reward to learn from and nothing that a fault could take: such a
study is refused before its first run.

A run takes as long as a finished run of its arm did. Before there is one, the time follows from that rehearsal, by what steps
and faults cost in the published studies of `results/`; no arm is trained for it.
The smallest detectable difference needs assumptions, since there are no data; they are printed beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import code_in
from shaketable.harden.config import TRAINED, HardenConfig
from shaketable.study.analysis.comparisons import assumed_spread, planned
from shaketable.study.cells import Cell, own_cells
from shaketable.study.config import PER_PROBLEM, StudyConfig
from shaketable.study.execute import finished, slots
from shaketable.study.runs import Run
from shaketable.train.config import TrainConfig

SCHEMA = "shaketable.forecast/2"
LOADING = 5.0
"""Seconds that a run takes beside steps and scores; a guess, small beside both."""
REHEARSED = 32
"""Problems that a model must solve one of."""
TRAINED_ON, FAULTY = 5.0, 1.6
"""How much longer than to score a problem it takes to train on one answer, and to score a problem under a fault: medians
over the arms of the published CPU studies (80 % of arms 3.7 to 6.1, of scores 1.1 to 2.1; block formats up to 7). On an H200
the medians are 2.0 and 1.2, and the spread is wider."""

Speeds = dict[tuple[str, str], float]
"""Seconds to score a problem, by model and task."""


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
    for cell in _first_cells(own_cells(study)):
        try:
            if cell.kind == "train":
                rehearse(TrainConfig.checked(**cell.config))
            elif cell.kind == "harden":
                check_hardening(HardenConfig.checked(**cell.config))
            else:
                check_scoring(cell.config)
        except ShaketableError as error:
            raise ShaketableError(f"arm {cell.arm!r}: {error}") from None


def check_scores(study: StudyConfig, folder: Path) -> Speeds:
    """Refuse a study in which a model solves no problem of its task; once, before there is a finished run.

    Tasks that are Python code are not tried here but by the runs, whose processes may die of it; and where runs are done on a
    cluster, this machine may not have their device.
    """
    cells = own_cells(study)
    if finished(cells, folder):
        return {}
    trained = [c for c in cells if c.kind in ("train", "harden") and not c.needs and not c.config["warm_start"]]
    return _speeds(study, trained, refuse=True)


def _speeds(study: StudyConfig, cells: Sequence[Cell], *, refuse: bool) -> Speeds:
    """Score each model on its task once."""
    found: Speeds = {}
    for cell in cells:
        model, task = place = cell.config["model"], cell.config["task"]
        if study.engine.kind != "local" or code_in(task) is not None or place in found:
            continue
        solved, count, seconds = _rehearsed(cell.config)
        if refuse and solved == 0:
            what = f"{model} solves 0 of {count} problems of {task} without a fault"
            why = "there is no reward to learn from, and nothing for a fault to take"
            raise ShaketableError(f"arm {cell.arm!r}: {what}: {why}; allow longer answers, or set train.warm_start")
        found[place] = seconds / count
    return found


def _rehearsed(config: dict[str, Any]) -> tuple[int | None, int, float]:
    """How many of a few problems the model solves (None for a task without answers), of how many, and in how many seconds."""
    import torch

    from shaketable.evaluate.score import Condition, Evaluator, arithmetic
    from shaketable.evaluate.tasks import draw, load_task
    from shaketable.models import load_model

    task = load_task(config["task"])
    tests = draw(task, min(REHEARSED, len(task.problems("test"))), config["eval_seed"])
    model, tokenizer = load_model(config["model"], device=config["device"], dtype=torch.float32)
    with arithmetic(config["device"], config["dtype"]):
        found = Evaluator(model, tokenizer, task, tests, REHEARSED).score(Condition("clean"))
    solved = sum(answer.correct > 0 for answer in found.answers) if task.kind == "generate" else None
    return solved, len(tests), found.seconds


def _first_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The first run of each arm."""
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell.arm is not None:
            first.setdefault(cell.arm, cell)
    return list(first.values())


# ---- how long it takes, and what it can show


@dataclass(frozen=True)
class Forecast:
    """What would run."""

    cells: list[Cell]
    left: list[Cell]
    """The runs that are not done yet."""
    seconds: float | None
    """None where no run is finished and no model could be rehearsed."""
    workers: int
    can_show: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{"name": c.name, "arm": c.arm, "seed": c.seed, "kind": c.kind, "to_do": c in self.left} for c in self.cells]
        facts = {"seconds": self.seconds, "workers": self.workers, "can_show": self.can_show}
        return {"schema": SCHEMA, "runs": rows, **facts}


def forecast(study: StudyConfig, folder: Path, tell: Callable[[str], None]) -> Forecast:
    """Look at what is there, and estimate the rest."""
    import torch

    from shaketable.models import quieten

    torch.set_num_threads(study.engine.threads)
    quieten()
    tell("scoring a few problems without a fault")
    speeds = check_scores(study, folder)
    cells = own_cells(study)
    runs = [Run.of(cell, folder / "runs") for cell in cells]
    left = [cell for cell, run in zip(cells, runs, strict=True) if not run.is_done]
    took = {run.arm: _took(run) for run in runs if run.is_done}
    new = [cell for cell in left if cell.arm not in took and cell.kind != "locate" and _place(cell) not in speeds]
    speeds |= _speeds(study, new, refuse=False)
    slowest = max(speeds.values(), default=None)
    each = [took.get(cell.arm) or _seconds(cell, speeds.get(_place(cell), slowest)) for cell in left]
    known = [seconds for seconds in each if seconds is not None]
    count = workers(study, max(1, len(left)))
    seconds = None if len(known) < len(each) else max(sum(known) / count, *known) if known else 0.0
    return Forecast(cells, left, seconds, count, can_show(study))


def _place(cell: Cell) -> tuple[str, str]:
    return cell.config["model"], cell.config.get("task", "")


def _took(run: Run) -> float | None:
    """Seconds of a finished run; None of one that was interrupted."""
    attempts, end = run.of_kind("attempt"), run.last("finished")
    return end["time"] - attempts[0]["time"] if len(attempts) == 1 and end is not None else None


def _seconds(cell: Cell, problem: float | None) -> float | None:
    """How long a run takes, from the seconds of scoring a problem without a fault."""
    if cell.kind == "locate":
        return 3 * LOADING
    if problem is None:
        return None
    answers, scores = 0, 1
    if cell.kind == "train":
        config = TrainConfig.checked(**cell.config)
        answers = config.steps * config.prompts * config.samples
        scores = sum(config.evaluates_at(step) for step in range(config.steps + 1))
    elif cell.kind == "harden":
        stages = HardenConfig.checked(**cell.config).climbed
        answers = cell.config["steps"] * cell.config["batch"] * sum(stage in TRAINED for stage in stages)
        scores = 1 + len(stages)
    conditions = 1 + FAULTY * (len(cell.config["conditions"]) + bool(cell.config.get("own")))
    seconds: float = LOADING + problem * (TRAINED_ON * answers + scores * cell.config["eval_n"] * conditions)
    return seconds


def workers(study: StudyConfig, most: int) -> int:
    """How many runs there can be at a time."""
    if study.engine.kind == "ray":
        return study.engine.workers or max(1, (os.cpu_count() or 1) // study.engine.threads)
    return len(slots(study, most))


def can_show(study: StudyConfig) -> str:
    """The difference of the primary endpoint that this study can show, with what that assumes."""
    primary, n, seeds = study.compare.primary, study.evaluate.n, len(study.seeds)
    if primary is None:
        return "no comparison is named, so none will be decided"
    what = f"{primary.a} − {primary.b}, {primary.condition or ''} {primary.endpoint}".replace("  ", " ")
    if seeds < 2:
        few = "one seed concludes" if seeds else "no seeds conclude"
        return f"{what}: {few} nothing about a recipe; give two or more, better five"
    if primary.endpoint not in PER_PROBLEM or primary.endpoint == "loss":
        return f"{what}: depends on how much {'losses' if primary.endpoint == 'loss' else 'runs'} differ; {seeds} seeds"
    size = planned(seeds, n)
    if size is None:
        return f"{what}: {seeds} seeds × {n} problems can show no difference"
    design = f"{seeds} seeds × {n} problems show a difference of {100 * size:.1f} points with 80 % power"
    return f"{what}: {design}, for {assumed_spread()}; the report computes it from the measured spread"

"""Before a study: whether it can run, whether there is anything to measure, how long it takes, and what difference it can show.

A model that solves none of the problems without a fault has no reward to learn from and nothing that a fault could take: such a
study is refused before its first run.

The probe trains every arm for two steps on a handful of problems, with its plan and AQN on, in a folder that is thrown
away; the second step is the one that counts. A guided arm is probed without its noise, for there is no diagnosis yet.
The smallest detectable difference needs assumptions, since there are no data; they are printed beside it.
"""

from __future__ import annotations

import os
import tempfile
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
from shaketable.train.config import TrainConfig

SCHEMA = "shaketable.forecast/1"
PROBLEMS = 16
STEPS = 2
LOADING = 5.0
"""Seconds that a run takes beside steps and scores; a guess, small beside both."""
REHEARSED = 32
"""Problems that a model must solve one of."""


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


def check_scores(study: StudyConfig, folder: Path) -> None:
    """Refuse a study in which a model solves no problem of its task; once, before there is a finished run.

    Tasks that are Python code are not tried here but by the runs, whose processes may die of it; and where runs are done on a
    cluster, this machine may not have their device.
    """
    cells = own_cells(study)
    if study.engine.kind != "local" or finished(cells, folder):
        return
    trained = [c for c in cells if c.kind in ("train", "harden") and not c.needs and not c.config["warm_start"]]
    tried = {(c.config["model"], c.config["task"]): c for c in reversed(trained)}
    for cell in reversed(tried.values()):
        if code_in(cell.config["task"]) is None and (solved := _solved(cell.config)) is not None and solved[0] == 0:
            what = f"{cell.config['model']} solves 0 of {solved[1]} problems of {cell.config['task']} without a fault"
            why = "there is no reward to learn from, and nothing for a fault to take"
            raise ShaketableError(f"arm {cell.arm!r}: {what}: {why}; allow longer answers, or set train.warm_start")


def _solved(config: dict[str, Any]) -> tuple[int, int] | None:
    """How many of a few problems the model solves, and of how many; None for a task without answers."""
    import torch

    from shaketable.evaluate.score import Condition, Evaluator, arithmetic
    from shaketable.evaluate.tasks import draw, load_task
    from shaketable.models import load_model

    task = load_task(config["task"])
    if task.kind != "generate":
        return None
    tests = draw(task, min(REHEARSED, len(task.problems("test"))), config["eval_seed"])
    model, tokenizer = load_model(config["model"], device=config["device"], dtype=torch.float32)
    with arithmetic(config["device"], config["dtype"]):
        found = Evaluator(model, tokenizer, task, tests, REHEARSED).score(Condition("clean"))
    return sum(answer.correct > 0 for answer in found.answers), len(tests)


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
    probed: int
    seconds: float
    workers: int
    can_show: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{"name": c.name, "arm": c.arm, "seed": c.seed, "kind": c.kind, "to_do": c in self.left} for c in self.cells]
        facts = {"probed_arms": self.probed, "seconds": self.seconds, "workers": self.workers, "can_show": self.can_show}
        return {"schema": SCHEMA, "runs": rows, **facts}


def forecast(study: StudyConfig, folder: Path, tell: Callable[[str], None]) -> Forecast:
    """Look at what is there, and probe the arms that have something to do."""
    import torch

    from shaketable.models import quieten

    check_scores(study, folder)
    cells = own_cells(study)
    done = finished(cells, folder)
    left = [cell for cell in cells if cell.name not in done]
    torch.set_num_threads(study.engine.threads)
    quieten()
    speeds: dict[str | None, tuple[float, float]] = {}
    for cell in _first_cells([cell for cell in left if cell.kind in ("train", "harden")]):
        tell(f"probing {cell.arm}")
        speeds[cell.arm] = _speed(cell)
    slowest = max((problem for _, problem in speeds.values()), default=0.05)
    each = [_seconds(cell, *speeds.get(cell.arm, (0.0, slowest))) for cell in left]
    seconds = max(sum(each) / workers(study, len(left)), *each) if each else 0.0
    return Forecast(cells, left, len(speeds), seconds, workers(study, max(1, len(left))), can_show(study))


def _speed(cell: Cell) -> tuple[float, float]:
    """Seconds of a step of an arm, and of a problem under all conditions together."""
    from shaketable.aqn.schedules import Constant
    from shaketable.aqn.spec import AQN
    from shaketable.harden.run import Hardening
    from shaketable.records.record import RunRecord
    from shaketable.train.run import Training

    config = cell.config
    few = {**config, "steps": STEPS, "eval_n": min(PROBLEMS, config["eval_n"]), "mechanism": False}
    with tempfile.TemporaryDirectory(prefix="shaketable-probe-") as name:
        folder = Path(name) / "run"
        if cell.kind == "train":
            if config["aqn"] is not None:  # at its loudest, all the time: two steps of a schedule may have no noise
                aqn = AQN.load(config["aqn"])
                loudest = max(aqn.schedule.sigma(step, config["steps"]) for step in range(config["steps"]))
                few["aqn"] = aqn.model_copy(update={"schedule": Constant(loudest)}).text()
            small = TrainConfig.checked(**few | {"warmup": 0, "eval_every": 0, "save_every": STEPS})
            record = RunRecord.create(folder, "train", small.model_dump(mode="json"), {})
            Training(small, record).run()
        else:
            hard = HardenConfig.checked(**few | {"rungs": [rung for rung in config["rungs"] if rung in TRAINED]})
            record = RunRecord.create(folder, "harden", hard.model_dump(mode="json"), {})
            Hardening(hard, record).run()
        steps, scores = record.events("step"), record.events("evaluation")
    problem = sum(c["seconds"] for c in scores[-1]["conditions"]) / few["eval_n"]
    return steps[-1]["seconds"] if steps else 0.0, problem


def _seconds(cell: Cell, step: float, problem: float) -> float:
    """How long a run takes, from the seconds of its steps and of the problems it is scored on."""
    if cell.kind == "locate":
        return 3 * LOADING
    steps, scores = 0, 1
    if cell.kind == "train":
        config = TrainConfig.checked(**cell.config)
        steps, scores = config.steps, sum(config.evaluates_at(step) for step in range(config.steps + 1))
    elif cell.kind == "harden":
        rungs = HardenConfig.checked(**cell.config).climbed
        steps, scores = cell.config["steps"] * sum(rung in TRAINED for rung in rungs), 1 + len(rungs)
    seconds: float = LOADING + steps * step + scores * cell.config["eval_n"] * problem
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

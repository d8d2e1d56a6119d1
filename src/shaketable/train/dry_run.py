"""Everything about a run that can be known before its weights are loaded: so that a mistake costs a second, not a night.

The plan and AQN are matched on the model's skeleton (built from its config, without weights), the schedule is asked whether it
ever fires in the given steps, the task is read, and the problems are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shaketable.aqn.attach import check_order, plan_of
from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import load_task, sample
from shaketable.inject import Injection
from shaketable.models import ADAPTER, load_skeleton
from shaketable.sites.structure import Anatomy
from shaketable.train.config import TrainConfig
from shaketable.train.plans import aqn_of, conditions_of, train_plan
from shaketable.train.warm_start import BATCH, check_answers


def rehearse(config: TrainConfig) -> tuple[Any, list[str]]:
    """Check a run; returns the model's skeleton and what the run would do, line by line.

    Raises:
        ShaketableError: Whatever would stop the run later.
    """
    task = load_task(config.task)
    if task.kind != "generate":
        raise ShaketableError(f"the task {task.name} has no answers to reward; train on one that has, such as arithmetic")
    if (Path(config.model).expanduser() / ADAPTER).is_file():
        raise ShaketableError(f"{config.model} is a LoRA adapter, which is not trained further; merge it into its base first")
    drawn = sample(task, "test", config.eval_n, config.eval_seed)
    have = len(task.problems("train"))
    if have == 0:
        raise ShaketableError(f"the task {task.name} has no train problems")
    skeleton = load_skeleton(config.model)
    lines = [
        f"{config.model}: {sum(p.numel() for p in skeleton.parameters()):,} parameters, {config.device}, {config.dtype}",
        f"{task.name}: {config.prompts} problems × {config.samples} answers a step, {config.steps * config.prompts:,} of "
        f"{have:,} train problems; scored on {len(drawn)} test problems",
    ]
    if config.warm_start:
        check_answers(task)
        lines.append(
            f"warm start: {config.warm_start} supervised steps of {BATCH} train problems, the same for every arm and seed"
        )
    for condition in conditions_of(config):
        if condition.plan is not None:
            Injection(condition.plan).attach(skeleton)
    if (plan := train_plan(config)) is not None:
        injection = Injection(plan)
        injection.attach(skeleton)
        lines += [f"plan in training: {c.text()}" for c in plan.clauses]
    scored = " and ".join("clean" if c.plan is None else c.plan.text() for c in conditions_of(config))
    at = f"every {config.eval_every} steps, and" if config.eval_every else "at"
    lines.append(f"scores: {scored}; {at} the first and the last step")
    if (aqn := aqn_of(config)) is not None:
        noise, groups = plan_of(aqn, Anatomy.of(skeleton))
        check_order(aqn, noise, train_plan(config), Anatomy.of(skeleton))
        order = f", {aqn.order} the plan's faults" if aqn.form == "output" and config.plan is not None else ""
        lines.append(f"AQN: {aqn.form} noise, {', '.join(g.label for g in groups)}, in {aqn.where}{order}")
    return skeleton, lines

"""The parts of a training run, from its configuration alone: the plan, the conditions of its scores, its AQN, and a
rehearsal.

`rehearse` checks everything that can be known before weights are loaded: the task is read, problems are counted, plan and AQN
are matched on the model's skeleton, and the schedule is asked whether it ever fires.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shaketable.aqn.attach import check_order, plan_of
from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError, ShaketableError
from shaketable.evaluate.score import Condition
from shaketable.evaluate.tasks import load_task, sample
from shaketable.faults.rng import key_of
from shaketable.inject import Injection
from shaketable.models import ADAPTER, load_skeleton
from shaketable.plan import Plan
from shaketable.sites.structure import Anatomy
from shaketable.train.config import PLAN_IN, RunConfig, TrainConfig
from shaketable.train.warm_start import BATCH, check_answers


def train_plan(config: TrainConfig) -> Plan | None:
    """The plan as it acts in training: each clause in its own phases and those of the run."""
    if (plan := evaluation_plan(config)) is None:
        return None
    entered = PLAN_IN[config.plan_in]
    clauses = []
    for clause in plan.clauses:
        own = tuple(p for p in (clause.site.phase or entered) if p in entered)
        if not own:
            named = "+".join(clause.site.phase)
            raise PlanError(
                f"{clause.text()} acts in {named} only, and with --plan-in {config.plan_in} the run never has it there; "
                f"drop phase={named}, or choose another --plan-in"
            )
        clauses.append(clause.model_copy(update={"site": clause.site.model_copy(update={"phase": own})}))
    seed = config.seed if config.plan_seed is None else config.plan_seed
    return plan.model_copy(update={"clauses": tuple(clauses), "seed": seed})


def evaluation_plan(config: TrainConfig) -> Plan | None:
    """The plan as a condition; its noise depends on the evaluation's seed, so that arms and steps are paired."""
    return None if config.plan is None else Plan.parse(config.plan, seed=config.eval_seed)


def aqn_of(config: TrainConfig) -> AQN | None:
    """The run's AQN, keyed by the run's seed."""
    if config.aqn is None:
        return None
    aqn = AQN.load(config.aqn)
    aqn.schedule.check(config.steps)
    return replace(aqn, seed=key_of(config.seed, "aqn", aqn.seed) >> 1)


def conditions_of(config: TrainConfig) -> list[Condition]:
    """Clean, the plan, and whatever else was asked for. What acts backward only is in no score: scores have no backward."""
    found = [Condition("clean")]
    if config.conditions is not None:
        return [*found, *(_scored(name, text, condition_seed(config)) for name, text in config.conditions.items())]
    if (plan := evaluation_plan(config)) is not None and (seen := _forward(plan)) is not None:
        found.append(Condition.of("plan", seen))
    return [*found, *(_scored(text, text, config.eval_seed) for text in config.eval_plans)]


def condition_seed(config: RunConfig) -> int:
    """Keys the noise of a study's conditions: another for every seed, the same in all arms."""
    return key_of(config.eval_seed, "condition", config.seed) >> 1


def _scored(name: str, text: str, seed: int) -> Condition:
    if (seen := _forward(Plan.parse(text, seed=seed))) is None:
        raise PlanError(f"{text} acts backward only: there is nothing of it in a score")
    return Condition.of(name, seen)


def _forward(plan: Plan) -> Plan | None:
    """The clauses that act in a forward pass; None when there are none."""
    clauses = tuple(c for c in plan.clauses if "forward" in c.site.directions)
    return plan.model_copy(update={"clauses": clauses}) if clauses else None


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

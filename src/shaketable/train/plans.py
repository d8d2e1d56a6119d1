"""What a run is made of, read from its configuration: the plan as training meets it, the conditions of its scores, its AQN."""

from __future__ import annotations

from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError
from shaketable.evaluate.score import Condition
from shaketable.faults.rng import key_of
from shaketable.plan import Plan
from shaketable.train.config import PLAN_IN, TrainConfig


def train_plan(config: TrainConfig) -> Plan | None:
    """The plan as it acts in training: each clause in its own phases and those of the run; None when it only evaluates."""
    plan = evaluation_plan(config)
    phases = PLAN_IN[config.plan_in]
    if plan is None:
        return None
    entered = (*phases, "eval") if config.plan_in == "eval" else phases
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
    return plan.model_copy(update={"clauses": tuple(clauses), "seed": seed}) if phases else None


def evaluation_plan(config: TrainConfig) -> Plan | None:
    """The plan as a condition; its noise depends on the evaluation's seed, so that arms and steps are paired."""
    return None if config.plan is None else Plan.parse(config.plan, seed=config.eval_seed)


def aqn_of(config: TrainConfig) -> AQN | None:
    """The run's AQN, keyed by the run's seed."""
    if config.aqn is None:
        return None
    aqn = AQN.load(config.aqn)
    aqn.schedule.check(config.steps)
    return aqn.model_copy(update={"seed": key_of(config.seed, "aqn", aqn.seed) >> 1})


def conditions_of(config: TrainConfig) -> list[Condition]:
    """Clean, the plan, and whatever else was asked for. What acts backward only is in no score: scores have no backward."""
    found = [Condition("clean")]
    if config.conditions is not None:
        return [*found, *(_named(name, text, config) for name, text in config.conditions.items())]
    if config.plan_in == "eval" and (plan := evaluation_plan(config)) is not None and _forward(plan) != plan:
        lost = next(c for c in plan.clauses if "forward" not in c.site.directions)
        raise PlanError(f"{lost.text()} acts backward only, and with --plan-in eval there is no backward: it would do nothing")
    if (plan := evaluation_plan(config)) is not None and (seen := _forward(plan)) is not None:
        found.append(Condition.of("plan", seen))
    return [*found, *(_scored(text, text, config.eval_seed) for text in config.eval_plans)]


def _named(name: str, text: str, config: TrainConfig) -> Condition:
    return _scored(name, text, condition_seed(config))


def condition_seed(config: TrainConfig) -> int:
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

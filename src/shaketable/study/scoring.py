"""A run that is only scored: the model as it comes, under every condition of the study, on the problems of all other runs.

It writes the same events as training does (`made_of`, `evaluation` of step 0, `mechanism`), so that whoever reads a study's
records need not know which kind of run they are of.

Under the condition `own` the arm's plan and its noise are one plan, whose clauses act in the order in which they stand: AQN of
a score has one σ and no rollout to be held for, so nothing but its clauses is left of it. One plan has one ledger, one line
that says what the score was taken under, and can be read layer by layer like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shaketable.aqn.attach import check_order, plan_of
from shaketable.evaluate.layers import check_skipped, readings, skip_layers, without
from shaketable.evaluate.score import Condition, Evaluation, Evaluator, arithmetic
from shaketable.evaluate.tasks import digest, draw, examples, load_task
from shaketable.inject import Injection
from shaketable.models import load_model, load_skeleton
from shaketable.plan import Clause, Plan
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash
from shaketable.sites.structure import Anatomy
from shaketable.study.config import CLEAN, OWN
from shaketable.train.config import TrainConfig
from shaketable.train.plans import aqn_of, condition_seed, conditions_of

OURS = ("own", "skip_layers")
"""Keys of a run that is only scored, which training has not."""


def score(record: RunRecord, tell: Any) -> None:
    """Score a model under every condition; the record has every answer."""
    config = scored_config(record.config)
    task = load_task(config.task)
    tests = draw(task, config.eval_n, config.eval_seed)
    tell("stage", {"text": f"loading {config.model}"})
    model, tokenizer = load_model(config.model, device=config.device, dtype=torch.float32)
    weights = weights_hash(model)
    if skipped := record.config.get("skip_layers", ()):
        skip_layers(model, skipped)
    evaluator = Evaluator(model, tokenizer, task, tests, config.eval_batch, loss=config.eval_loss)
    done: list[Evaluation] = []
    for condition in conditions(config, record.config, model):
        tell("stage", {"text": f"scoring {condition.name}"})
        with arithmetic(config.device, config.dtype):
            done.append(_scored(evaluator, condition, done))
    if not record.events("made_of"):
        record.append("made_of", tests=digest(tests), weights=weights, batch_size=config.eval_batch)
    if not record.events("examples") and task.kind == "generate":
        record.append("examples", problems=examples(tests))
    if not record.events("evaluation"):
        record.append("evaluation", step=0, conditions=[e.to_dict() for e in done])
    if config.mechanism and not record.events("mechanism"):
        with arithmetic(config.device, config.dtype):
            record.append("mechanism", step=0, conditions=readings(evaluator, done))
    tell("evaluation", {"step": 0, "conditions": [e.summary() for e in done]})
    record.append("finished", step=0, ledgers={})


def scored_config(config: dict[str, Any]) -> TrainConfig:
    """The configuration of a run that is only scored, as that of a training of one step."""
    return TrainConfig.checked(**{key: value for key, value in config.items() if key not in OURS}, steps=1)


def conditions(config: TrainConfig, asked: dict[str, Any], model: Any) -> list[Condition]:
    """Clean, those of the study, and the arm's own where there is one; without the faults of layers that are not run."""
    found = conditions_of(config)
    if skipped := asked.get("skip_layers", ()):
        found = [c if c.plan is None else Condition(c.name, without(c.plan, skipped, model)) for c in found]
    return [*found, Condition.of(OWN, _own_plan(config, model))] if asked.get("own") else found


def _own_plan(config: TrainConfig, model: Any) -> Plan | None:
    """Plan and noise as one plan, in their order; None for an arm that has neither."""
    aqn, seed = aqn_of(config), condition_seed(config)
    faults = None if config.plan is None else Plan.parse(config.plan, seed=seed)
    if aqn is None:
        return faults
    anatomy = Anatomy.of(model)
    noise, _ = plan_of(aqn, anatomy)
    check_order(aqn, noise, faults, anatomy)
    clauses = noise.clauses if faults is None else joined(aqn.order, noise, faults)
    return Plan(clauses=clauses, seed=seed)


def joined(order: str, noise: Plan, faults: Plan) -> tuple[Clause, ...]:
    """The clauses of both, in the order in which they act."""
    return (*noise.clauses, *faults.clauses) if order == "before" else (*faults.clauses, *noise.clauses)


def _scored(evaluator: Evaluator, condition: Condition, done: list[Evaluation]) -> Evaluation:
    """A score; that of an arm with nothing on is the clean one, which is there already."""
    clean = next((e for e in done if e.condition.name == CLEAN), None)
    return replace(clean, condition=condition) if condition.plan is None and clean is not None else evaluator.score(condition)


def check_scoring(config: dict[str, Any]) -> None:
    """Whatever can be known before the weights are loaded; raises what would stop the run later."""
    checked = scored_config(config)
    draw(load_task(checked.task), checked.eval_n, checked.eval_seed)
    skeleton = load_skeleton(checked.model)
    if skipped := config.get("skip_layers", ()):
        check_skipped(skeleton, skipped)
    for condition in conditions(checked, config, skeleton):
        if condition.plan is not None:
            Injection(condition.plan).attach(skeleton)

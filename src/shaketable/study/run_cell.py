"""Doing one run of a study, in whatever process it is given to.

    lock → record (new, or the one that was begun) → attempt → work → finished, or failed with the reason

A run that was killed is resumed. Everything that a run needs is in its cell and, for a guided arm, in the record of its
diagnosis, so that any process on any machine that sees the store can do it.

A run that is only scored writes the same events as training does (`made_of`, `evaluation` of step 0, `mechanism`). Under the
condition `own` the arm's plan and its noise are one plan, with one ledger.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from shaketable.aqn.attach import check_order, plan_of
from shaketable.aqn.schedules import Constant
from shaketable.errors import ShaketableError
from shaketable.evaluate.layers import check_skipped, readings, skip_layers, without
from shaketable.evaluate.score import Condition, Evaluation, Evaluator, arithmetic
from shaketable.evaluate.tasks import digest, draw, examples, load_task
from shaketable.inject import Injection
from shaketable.io.locks import held
from shaketable.models import load_model, load_skeleton
from shaketable.plan import Plan
from shaketable.records.environment import gather
from shaketable.records.record import RunRecord, is_begun
from shaketable.records.weight_hash import weights_hash
from shaketable.sites.structure import Anatomy
from shaketable.study.cells import Cell
from shaketable.study.config import CLEAN, OWN
from shaketable.train.config import TrainConfig
from shaketable.train.plans import aqn_of, condition_seed, conditions_of

Ending = Literal["done", "elsewhere"]


def do(cell: Cell, study: str, runs: Path, engine: str) -> Ending:
    """Start or resume one run.

    Raises:
        ShaketableError: The run cannot be done as it was asked for; its record says so too.
    """
    with held(runs, cell.name) as ours:
        if not ours:
            return "elsewhere"
        folder = runs / cell.name
        begun = is_begun(folder)
        if begun:
            record = RunRecord.open(folder, cell.kind)
            if record.head.get("about", {}).get("key") != cell.key:
                raise ShaketableError(f"{folder} holds another run than its name says; move it away")
        else:
            record = RunRecord.create(folder, cell.kind, _filled_in(cell, runs), gather(), about=cell.about(study))
        if record.events("finished"):
            record.seal()
            return "done"
        with record.alone():
            _attempt(cell, record, engine, begun)
        return "done"


def _filled_in(cell: Cell, runs: Path) -> dict[str, Any]:
    """The configuration, with the AQN that a diagnosis gives a guided arm."""
    if cell.guide is None:
        return cell.config
    from shaketable.aqn.guidance import Guidance

    guide = dict(cell.guide)
    found = RunRecord.open(runs / str(cell.needs), "locate").events("diagnosis")[-1]["diagnosis"]
    guidance = Guidance.of(found, base_sigma=guide["sigma"], schedule=guide["schedule"], target=guide["guide"])
    aqn = guidance.aqn(**{key: guide[key] for key in ("form", "where", "unit", "order")})
    if cell.kind == "evaluate":
        aqn = replace(aqn, schedule=Constant(guide["sigma"]))
    return {**cell.config, "aqn": aqn.text()}


def _attempt(cell: Cell, record: RunRecord, engine: str, begun: bool) -> None:
    number = 1 + len(record.events("attempt"))
    record.append("attempt", number=number, pid=os.getpid(), engine=engine)
    try:
        if cell.kind == "train":
            from shaketable.train.run import Training

            Training(TrainConfig.checked(**record.config), record).run(resume=begun)
        elif cell.kind == "harden":
            from shaketable.harden.config import HardenConfig
            from shaketable.harden.run import Hardening

            Hardening(HardenConfig.checked(**record.config), record).run(resume=begun)
        elif cell.kind == "locate":
            _locate(record)
        else:
            _score(record)
    except BaseException as error:
        text = str(error) if isinstance(error, ShaketableError) else f"{type(error).__name__}: {error}"
        if not record.events("finished"):
            record.append("failed", error=text[:2000], exit=1, final=isinstance(error, ShaketableError))
        raise
    if cell.kind in ("train", "harden"):
        _tidy(record.folder, cell.keep_weights)


def _tidy(folder: Path, keep_weights: bool) -> None:
    """Remove the checkpoints of a finished run, and its weights unless they are kept; also those of a run within it."""
    for checkpoint in list(folder.rglob("checkpoint-*")):
        shutil.rmtree(checkpoint)
    for weights in () if keep_weights else {file.parent for file in folder.rglob("*.safetensors")}:
        shutil.rmtree(weights)


# ---- diagnoses


def _locate(record: RunRecord) -> None:
    from shaketable.locate.locate import locate

    config = record.config
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
    )
    record.append("diagnosis", diagnosis=diagnosis.as_dict())
    record.append("finished")


# ---- runs that are only scored


def _score(record: RunRecord) -> None:
    """Score a model as it comes under every condition, on the problems of all other runs; the record has every answer."""
    config = _as_training(record.config)
    task = load_task(config.task)
    tests = draw(task, config.eval_n, config.eval_seed)
    model, tokenizer = load_model(config.model, device=config.device, dtype=torch.float32)
    weights = weights_hash(model)
    if skipped := record.config.get("skip_layers", ()):
        skip_layers(model, skipped)
    evaluator = Evaluator(model, tokenizer, task, tests, config.eval_batch, loss=config.eval_loss)
    done: list[Evaluation] = []
    for condition in _conditions(config, record.config, model):
        clean = next((e for e in done if e.condition.name == CLEAN), None)
        if condition.plan is None and clean is not None:  # of an arm with nothing on: it is there already
            done.append(replace(clean, condition=condition))
            continue
        with arithmetic(config.device, config.dtype):
            done.append(evaluator.score(condition))
    if not record.events("made_of"):
        record.append("made_of", tests=digest(tests), weights=weights, batch_size=config.eval_batch)
    if not record.events("examples") and task.kind == "generate":
        record.append("examples", problems=examples(tests))
    if not record.events("evaluation"):
        record.append("evaluation", step=0, conditions=[e.to_dict() for e in done])
    if config.mechanism and not record.events("mechanism"):
        with arithmetic(config.device, config.dtype):
            record.append("mechanism", step=0, conditions=readings(evaluator, done))
    record.append("finished", step=0, ledgers={})


def check_scoring(config: dict[str, Any]) -> None:
    """Check a run that is only scored without loading its weights; raises what would stop it later."""
    checked = _as_training(config)
    draw(load_task(checked.task), checked.eval_n, checked.eval_seed)
    skeleton = load_skeleton(checked.model)
    if skipped := config.get("skip_layers", ()):
        check_skipped(skeleton, skipped)
    for condition in _conditions(checked, config, skeleton):
        if condition.plan is not None:
            Injection(condition.plan).attach(skeleton)


def _as_training(config: dict[str, Any]) -> TrainConfig:
    """The configuration of a run that is only scored, as that of a training of one step."""
    return TrainConfig.checked(**{key: value for key, value in config.items() if key not in ("own", "skip_layers")}, steps=1)


def _conditions(config: TrainConfig, asked: dict[str, Any], model: Any) -> list[Condition]:
    """Clean, those of the study, and the arm's own where there is one; without the faults of layers that are not run."""
    found = conditions_of(config)
    if skipped := asked.get("skip_layers", ()):
        found = [c if c.plan is None else Condition(c.name, without(c.plan, skipped, model)) for c in found]
    return [*found, Condition.of(OWN, _own_plan(config, model))] if asked.get("own") else found


def _own_plan(config: TrainConfig, model: Any) -> Plan | None:
    """Plan and noise as one plan, in the order in which they act; None for an arm that has neither."""
    aqn, seed = aqn_of(config), condition_seed(config)
    faults = None if config.plan is None else Plan.parse(config.plan, seed=seed)
    if aqn is None:
        return faults
    anatomy = Anatomy.of(model)
    noise, _ = plan_of(aqn, anatomy)
    check_order(aqn, noise, faults, anatomy)
    after = () if faults is None else faults.clauses
    return Plan(clauses=(*noise.clauses, *after) if aqn.order == "before" else (*after, *noise.clauses), seed=seed)

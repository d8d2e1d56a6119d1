"""A run that is only scored: the model as it comes, under every condition of the study, on the problems of all other runs.

It writes the same events as training does (`made_of`, `evaluation` of step 0, `mechanism`), so that whoever reads a study's
records need not know which kind of run they are of.
"""

from __future__ import annotations

from typing import Any

import torch

from shaketable.harden.grpo.config import TrainConfig
from shaketable.harden.grpo.plans import conditions_of
from shaketable.inject import Injection
from shaketable.locate.capture.model_identity import weights_hash
from shaketable.measure.evaluation import Evaluator, arithmetic
from shaketable.measure.score_layer_stats import readings
from shaketable.measure.tasks import load_task, sample
from shaketable.measure.tasks.task import digest, examples
from shaketable.models import load_model, load_skeleton
from shaketable.records.record import RunRecord


def score(record: RunRecord, tell: Any) -> None:
    """Score a model under every condition; the record has every answer."""
    config = TrainConfig.checked(**record.config, steps=1)
    task = load_task(config.task)
    tests = sample(task, "test", config.eval_n, config.eval_seed)
    tell("stage", {"text": f"loading {config.model}"})
    model, tokenizer = load_model(config.model, device=config.device, dtype=torch.float32)
    evaluator = Evaluator(model, tokenizer, task, tests, config.eval_batch)
    done = []
    for condition in conditions_of(config):
        tell("stage", {"text": f"scoring {condition.name}"})
        with arithmetic(config.device, config.dtype):
            done.append(evaluator.score(condition))
    if not record.events("made_of"):
        record.append("made_of", tests=digest(tests), weights=weights_hash(model), batch_size=config.eval_batch)
    if not record.events("examples"):
        record.append("examples", problems=examples(tests))
    if not record.events("evaluation"):
        record.append("evaluation", step=0, conditions=[e.to_dict() for e in done])
    if config.mechanism and not record.events("mechanism"):
        with arithmetic(config.device, config.dtype):
            record.append("mechanism", step=0, conditions=readings(evaluator, done))
    tell("evaluation", {"step": 0, "conditions": [e.summary() for e in done]})
    record.append("finished", step=0, ledgers={})


def check_scoring(config: TrainConfig) -> None:
    """Whatever can be known before the weights are loaded; raises what would stop the run later."""
    task = load_task(config.task)
    sample(task, "test", config.eval_n, config.eval_seed)
    skeleton = load_skeleton(config.model)
    for condition in conditions_of(config):
        if condition.plan is not None:
            Injection(condition.plan).attach(skeleton)

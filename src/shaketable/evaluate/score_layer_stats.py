"""The mechanism of a run's scores: the model's own clean answers, read again under every condition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shaketable.errors import InertError
from shaketable.evaluate.evaluation import Evaluation, Evaluator
from shaketable.evaluate.layer_stats import mechanism
from shaketable.evaluate.text_evaluation import TextEvaluator

PAIRS = 32
"""Answers that are read: enough for stable means, little beside the scores themselves."""


def readings(evaluator: Evaluator | TextEvaluator, done: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One reading per condition, on the first answers that the clean model gave; the first of `done` is clean."""
    clean = done[0].completions
    pairs = [(p, c.tokens) for p, c in zip(evaluator.prompts, clean, strict=True) if c.tokens][:PAIRS]
    if not pairs:
        return []
    found = []
    for evaluation in done:
        plan = evaluation.condition.plan
        try:
            read = mechanism(evaluator.model, pairs, plan, batch_size=PAIRS, pad=evaluator.decoder.pad).to_dict()
        except InertError as error:  # a rare fault that hit in the scores, which prove it, and not in these few answers
            read = {"loss": None, "layers": [], "note": str(error)}
        found.append({"condition": evaluation.condition.name, **read})
    return found

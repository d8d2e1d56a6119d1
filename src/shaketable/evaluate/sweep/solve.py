"""A model that solves problems, as a sweep measures it: answers, and how far a fault takes the model from itself.

KL(clean‖faulty) and top-1 agreement are read on the clean model's own answers to the first 64 problems, under the first seed:
some hundred to thousand tokens, which is plenty for a mean of small spread, at the price of one batch of readings. The
clean answers are recorded as tokens, so that a resumed sweep reads the same ones without writing them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shaketable.evaluate.decoding.dynamic import Progress, probe_batch_size
from shaketable.evaluate.evaluation import Condition, Evaluator, drift
from shaketable.evaluate.sweep.config import Setting
from shaketable.evaluate.tasks import Problem, Task
from shaketable.plan import Plan

READ = 64
"""Answers that KL and agreement are read on."""
LOGITS = 2**26
"""The most logits of one reading: a quarter of a GiB in float32, of which some copies are needed."""


def reading_batch(model: Any, sequences: Sequence[Sequence[int]]) -> int:
    """Rows of one reading. Follows from the model and the texts alone, so that a resumed sweep reads in the same batches."""
    width = max(len(s) for s in sequences)
    return max(1, min(READ, LOGITS // (width * int(model.get_output_embeddings().weight.shape[0]))))


def finite(value: float) -> float | None:
    """The number; None for one that JSON has no word for."""
    return value if math.isfinite(value) else None


class Solving:
    """One model and the problems it solves."""

    def __init__(self, model: Any, tokenizer: Any, task: Task, problems: Sequence[Problem], batch_size: int | None) -> None:
        self.evaluator = Evaluator(model, tokenizer, task, problems, 1)
        found = batch_size or probe_batch_size(self.evaluator.decoder, model, self.evaluator.prompts)
        self.evaluator.batch_size = self.batch_size = found
        self.clean: list[list[int]] = []
        """What the clean model wrote to the first problems."""

    def remember(self, clean: dict[str, Any]) -> None:
        """Take the clean answers from the record."""
        self.clean = clean["completions"]

    def measure(self, setting: Setting, progress: Progress | None = None) -> dict[str, Any]:
        """One run over all problems, as the record keeps it."""
        found = self.evaluator.score(Condition.of(setting.name, setting.plan), progress)
        facts = {**found.to_dict(), "tokens": found.tokens}
        if setting.plan is None:
            self.clean = [c.tokens for c in found.completions[:READ]]
            return {**facts, "completions": self.clean}
        return {**facts, "drift": self._drift(setting.plan) if setting.is_first else None}

    def _drift(self, plan: Plan) -> dict[str, Any]:
        """The ledger of the answers is the proof; on these few tokens a rare fault may do nothing, and that is KL 0."""
        model, pad = self.evaluator.model, self.evaluator.decoder.pad
        pairs = list(zip(self.evaluator.prompts, self.clean, strict=False))
        size = min(self.batch_size, reading_batch(model, [[*p, *c] for p, c in pairs]))
        found, _ = drift(model, pairs, plan, size, pad, check=False)
        return {"kl": finite(found.kl), "agreement": found.agreement, "tokens": found.tokens}

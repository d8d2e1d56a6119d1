"""Texts under a condition, told as an evaluation: per text its loss, and the share of its tokens that was foreseen.

A study that trains nothing may read texts in place of solving problems. It has the interface of `Evaluator`, so that whoever
keeps or compares scores need not know which of the two made them. A sweep has its own way of reading texts
(`sweep/text_loss.py`), which compares each batch with the clean model and needs no pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.dynamic import Completion, Decoder
from shaketable.evaluate.evaluation import Answer, Condition, Evaluation
from shaketable.evaluate.tasks import Problem
from shaketable.evaluate.token_loss import read
from shaketable.inject import inject
from shaketable.sites.phases import phase


class TextEvaluator:
    """One model and the texts that it reads; a text longer than the model's context is read as far as that goes."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[Problem], batch_size: int) -> None:
        self.model, self.problems, self.batch_size = model, list(texts), batch_size
        self.decoder = Decoder.of(model, tokenizer, 1)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        ids = [tokenizer(t.question)["input_ids"][:context] for t in texts]
        if short := next((t for t, tokens in zip(texts, ids, strict=True) if len(tokens) < 2), None):
            raise ShaketableError(f"{short.id} is shorter than two tokens: one to read and one to foresee")
        self.prompts = [tokens[:1] for tokens in ids]
        self.rest = [tokens[1:] for tokens in ids]

    def score(self, condition: Condition) -> Evaluation:
        """Read every text under a condition. The model's training flag is left as it was."""
        start, was_training = time.perf_counter(), self.model.training
        shaken = nullcontext() if condition.plan is None else inject(self.model, condition.plan)
        self.model.eval()
        try:
            with phase("eval"), shaken as ledger:
                found = read(self.model, list(zip(self.prompts, self.rest, strict=True)), self.batch_size, self.decoder.pad)
        finally:
            self.model.train(was_training)
        answers = [Answer(p.id, "", r.foreseen, True, r.loss) for p, r in zip(self.problems, found, strict=True)]
        read_tokens = [Completion(list(tokens), []) for tokens in self.rest]
        return Evaluation(condition, answers, read_tokens, ledger, time.perf_counter() - start, self.batch_size)

"""A model that reads texts, as a sweep measures it: per text its loss, the tokens foreseen, and the distance to clean.

Nothing is generated. A reading is a forward pass over a batch of texts, padded on the right; under a fault each batch is
read twice, clean and faulty, so that KL(clean‖faulty) costs no memory beyond one batch. Sums per text are kept, not means:
perplexity is exp(total loss / total tokens), while scores that are paired text by text divide by the text's own tokens.

Of a text that is longer than the model's context the beginning is read; how many were cut is recorded, and reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.dynamic import Progress, batches
from shaketable.evaluate.evaluation import Condition, proof_of
from shaketable.evaluate.sweep.config import Setting
from shaketable.evaluate.sweep.solve import finite, reading_batch
from shaketable.evaluate.tasks import Problem, Task
from shaketable.inject import Injection, inject
from shaketable.sites.phases import phase

LONGEST = 2048
"""Tokens of a text, for a model that names no limit."""


class TextReading:
    """One model and the texts it reads."""

    def __init__(self, model: Any, tokenizer: Any, task: Task, texts: Sequence[Problem], batch_size: int | None) -> None:
        self.model, self.texts = model, list(texts)
        self.limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or LONGEST
        whole = [tokenizer(t.question, truncation=True, max_length=self.limit + 1)["input_ids"] for t in texts]
        self.ids = [ids[: self.limit] for ids in whole]
        self.cut = sum(len(ids) > self.limit for ids in whole)
        self.pad = int(tokenizer.pad_token_id or 0)
        if short := next((t for t, ids in zip(texts, whole, strict=True) if len(ids) < 2), None):
            raise ShaketableError(f"{short.id} is shorter than two tokens: one to read and one to foresee")
        self.batch_size = batch_size or reading_batch(model, self.ids)

    def remember(self, clean: dict[str, Any]) -> None:
        """Nothing: the clean model is read beside the faulty one."""

    def measure(self, setting: Setting, progress: Progress | None = None) -> dict[str, Any]:
        """One run over all texts, as the record keeps it."""
        start, condition = time.perf_counter(), Condition.of(setting.name, setting.plan)
        injection = None if condition.plan is None else inject(self.model, condition.plan)
        try:
            rows = self._read_all(injection, progress)
        except BaseException:
            if injection is not None:
                injection.close(check=False)
            raise
        proof: dict[str, Any] = {"injections": 0, "measured_error": 0.0, "ledger": None}
        if injection is not None:
            injection.close()
            proof = {**proof_of(injection.ledger), "ledger": injection.ledger.to_dict()}
        sums = {"n": len(rows), "tokens": sum(r["tokens"] for r in rows), "cut": self.cut, "limit": self.limit}
        spent = {"seconds": time.perf_counter() - start, "batch_size": self.batch_size}
        return {**condition.to_dict(), **sums, **proof, **spent, "texts": rows}

    def _read_all(self, injection: Injection | None, progress: Progress | None) -> list[dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = {}
        with torch.no_grad(), phase("eval"):
            for indices in batches(self.ids, self.batch_size):
                rows.update(zip(indices, self._read(indices, injection), strict=True))
                if progress is not None:
                    progress(len(rows), len(self.ids))
        return [rows[i] for i in range(len(rows))]

    def _read(self, indices: list[int], injection: Injection | None) -> list[dict[str, Any]]:
        ids, mask = self._padded(indices)
        clean = found = self._log_probs(ids, mask)
        if injection is not None:
            injection.enable()
            found = self._log_probs(ids, mask)
            injection.disable()
        counts, next_ids = mask[:, 1:].bool(), ids[:, 1:]
        losses = -found.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)
        columns = {
            "loss": _row_sums(losses, counts),
            "correct": _row_sums(found.argmax(-1) == next_ids, counts),
            "kl": _row_sums((clean.exp() * (clean - found)).sum(-1), counts),
            "agree": _row_sums(found.argmax(-1) == clean.argmax(-1), counts),
        }
        return [self._row(index, {name: column[i] for name, column in columns.items()}) for i, index in enumerate(indices)]

    def _row(self, index: int, sums: dict[str, float]) -> dict[str, Any]:
        whole = {name: round(sums[name]) for name in ("correct", "agree")}
        read = {name: finite(sums[name]) for name in ("loss", "kl")}
        return {"id": self.texts[index].id, "tokens": len(self.ids[index]) - 1, **whole, **read}

    def _log_probs(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, :-1].float().log_softmax(-1)

    def _padded(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        width = max(len(self.ids[i]) for i in indices)
        rows = [self.ids[i] + [self.pad] * (width - len(self.ids[i])) for i in indices]
        mask = [[1] * len(self.ids[i]) + [0] * (width - len(self.ids[i])) for i in indices]
        device = self.model.get_input_embeddings().weight.device
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def _row_sums(values: Tensor, counts: Tensor) -> list[float]:
    """Sums over the positions that count; what stands at the others may be anything, NaN too."""
    found: list[float] = values.double().where(counts, 0.0).sum(1).tolist()
    return found

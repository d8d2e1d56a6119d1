"""The trainer's side: a Hugging Face model that gives its own log-probabilities, in the ways that trainers batch and pad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.logprobs import chosen, completion_logits
from shaketable.mismatch.results import TrainerFacts

BATCH = 4
OTHER_BATCHES = "other batches, padded on the left"
"""A variant: larger batches of rows in another order."""


class Trainer:
    """A model as a trainer reads rollouts with it: padded on the right, in batches."""

    def __init__(self, model: Any, tokenizer: Any, name: str, batch: int = BATCH) -> None:
        self.model, self.tokenizer, self.name, self.batch = model.eval(), tokenizer, name, batch
        self.dtype = next(model.parameters()).dtype
        self.device = next(model.parameters()).device

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """The longest sequence."""
        found = getattr(self.model.config, "max_position_embeddings", None)
        return None if found is None else int(found)

    @property
    def attention(self) -> str:
        """sdpa, eager, …"""
        return str(self.model.config._attn_implementation)

    def describe(self) -> TrainerFacts:
        """For the report."""
        import torch
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        dtype = str(self.dtype).removeprefix("torch.")
        return TrainerFacts(self.name, dtype, str(self.device), self.attention, self.batch, versions)

    def logits(self, rollouts: Sequence[Rollout], mode: AbstractContextManager[Any] | None = None) -> Iterator[Tensor]:
        """Logits of the completions' tokens, rollout by rollout; every forward runs inside `mode`."""
        return completion_logits(self.model, rollouts, batch=self.batch, mode=mode)

    def logprobs(self, rollouts: Sequence[Rollout], variant: str | None = None) -> list[list[float]]:
        """Log-probabilities of the completions' tokens; computed as by default, or as one of `variants`."""
        order = list(range(len(rollouts)))
        how: dict[str, Any] = {"batch": self.batch}
        if variant == OTHER_BATCHES:
            how = {"batch": self.batch + 1, "side": "left", "extra": 3}
            order.sort(key=lambda i: (len(rollouts[i].tokens), -i))
        some = [rollouts[i] for i in order]
        logits = completion_logits(self.model, some, **how)
        found = [chosen(one, r.completion) for r, one in zip(some, logits, strict=True)]
        return [lp for _, lp in sorted(zip(order, found, strict=True))]

    def variants(self) -> list[str]:
        """Ways of computing the same that round differently."""
        return [OTHER_BATCHES]

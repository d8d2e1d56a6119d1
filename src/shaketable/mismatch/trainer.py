"""The trainer's side: a Hugging Face model that gives its own log-probabilities, in the ways that trainers batch and pad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from shaketable.mismatch.engines.engine import NotToldError, Rollout
from shaketable.mismatch.teacher_forcing import chosen, completion_logits

BATCH = 4
OTHER_ATTENTION = {"sdpa": "eager", "eager": "sdpa"}


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

    def describe(self) -> dict[str, object]:
        """For the report."""
        import torch
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"model": self.name, "dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device)}
        return {**about, "attention": self.attention, "batch": self.batch, "versions": versions}

    def logits(self, rollouts: Sequence[Rollout], mode: AbstractContextManager[Any] | None = None) -> Iterator[Tensor]:
        """Of the completions' tokens, rollout by rollout; every forward runs inside `mode`."""
        return completion_logits(self.model, rollouts, batch=self.batch, mode=mode)

    def logprobs(self, rollouts: Sequence[Rollout], variant: str | None = None) -> list[list[float]]:
        """Of the completions' tokens; computed as by default, or as one of `variants`."""
        if variant is None:
            return _scored(rollouts, self.logits(rollouts))
        if variant == "batch of one":
            return _scored(rollouts, completion_logits(self.model, rollouts, batch=1))
        if variant == "other micro-batches":
            order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].tokens), -i))
            found = _scored(some := [rollouts[i] for i in order], completion_logits(self.model, some, batch=self.batch + 1))
            return [lp for _, lp in sorted(zip(order, found, strict=True))]
        if variant == "padded on the left":
            return _scored(rollouts, completion_logits(self.model, rollouts, batch=self.batch, side="left", extra=3))
        with self._attention(variant.removesuffix(" attention")):
            return _scored(rollouts, completion_logits(self.model, rollouts, batch=self.batch))

    def variants(self) -> list[str]:
        """Ways of computing the same that round differently."""
        own = ["batch of one", "other micro-batches", "padded on the left"]
        other = OTHER_ATTENTION.get(self.attention)
        return [*own, *([] if other is None else [f"{other} attention"])]

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        was = self.attention
        try:
            self.model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise NotToldError(f"this model has no {name} attention: {str(error).splitlines()[0]}") from error
        try:
            yield
        finally:
            self.model.set_attn_implementation(was)


def _scored(rollouts: Sequence[Rollout], logits: Iterator[Tensor]) -> list[list[float]]:
    return [chosen(one, r.completion) for r, one in zip(rollouts, logits, strict=True)]

"""Logits of completions that are given: a causal model reads prompt and completion, in the ways that people batch and pad.

Every way computes the same in exact arithmetic; each rounds differently. One function serves the trainer and an engine that
is a Hugging Face model, so that whatever they differ by is not this code. Logits come rollout by rollout, since a vocabulary
times all tokens of a run does not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from shaketable.mismatch.engines.engine import Rollout

Side = Literal["left", "right"]


@torch.no_grad()
def completion_logits(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    batch: int = 8,
    side: Side = "right",
    extra: int = 0,
    mode: AbstractContextManager[Any] | None = None,
) -> Iterator[Tensor]:
    """Logits (tokens of the completion, vocabulary) of each rollout, in their order, in the model's dtype.

    Args:
        model: A causal language model.
        rollouts: What it reads.
        batch: Rows of one forward.
        side: Where rows are padded.
        extra: Columns of padding beyond what the longest row needs.
        mode: A context that every forward runs in.
    """
    device = model.get_input_embeddings().weight.device
    for start in range(0, len(rollouts), batch):
        some = rollouts[start : start + batch]
        width = max(len(r.tokens) for r in some) + extra
        ids, mask = torch.zeros(len(some), width, dtype=torch.long), torch.zeros(len(some), width, dtype=torch.long)
        for row, rollout in enumerate(some):
            place = slice(width - len(rollout.tokens), width) if side == "left" else slice(0, len(rollout.tokens))
            ids[row, place], mask[row, place] = torch.tensor(rollout.tokens), 1
        ids, mask = ids.to(device), mask.to(device)
        with mode if mode is not None else nullcontext():
            logits = model(input_ids=ids, **masked(mask), use_cache=False).logits
        for row, rollout in enumerate(some):
            end = width if side == "left" else len(rollout.tokens)
            yield logits[row, end - len(rollout.completion) - 1 : end - 1].cpu()


def masked(mask: Tensor, last: int | None = None) -> dict[str, Tensor]:
    """Mask and positions of the last so many columns; none where nothing is padded, as trainers call their models then."""
    if bool(mask.all()):
        return {}
    places = (mask.cumsum(1) - 1).clamp_min(0)
    return {"attention_mask": mask, "position_ids": places if last is None else places[:, -last:]}


@torch.no_grad()
def decoded_logits(model: Any, rollouts: Sequence[Rollout], batch: int = 1) -> Iterator[Tensor]:
    """The same, token by token with the model's cache and padded on the left, as a sampler computes them."""
    device = model.get_input_embeddings().weight.device
    for first in range(0, len(rollouts), batch):
        some = rollouts[first : first + batch]
        width = max(len(r.prompt) for r in some)
        ids, mask = torch.zeros(len(some), width, dtype=torch.long), torch.zeros(len(some), width, dtype=torch.long)
        for row, rollout in enumerate(some):
            ids[row, width - len(rollout.prompt) :], mask[row, width - len(rollout.prompt) :] = torch.tensor(rollout.prompt), 1
        mask, cache, rows = mask.to(device), None, []
        for step in range(max(len(r.completion) for r in some)):
            if step:
                ids = torch.tensor([[r.completion[step - 1] if step <= len(r.completion) else 0] for r in some])
                mask = torch.cat([mask, mask.new_ones(len(some), 1)], 1)
            told = masked(mask, ids.shape[1])
            out = model(input_ids=ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1, **told)
            cache = out.past_key_values
            rows.append(out.logits[:, -1].cpu())
        for row, rollout in enumerate(some):
            yield torch.stack([step[row] for step in rows[: len(rollout.completion)]])


def chosen(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens under logits, normalised in float64: the sum over the vocabulary adds no error of its own."""
    wide = logits.double()
    picked = wide.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)
    found: list[float] = (picked - wide.logsumexp(-1)).tolist()
    return found

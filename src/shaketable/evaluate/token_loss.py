"""How well a model foresees given tokens: one loss for every pair of a prompt and what should follow it.

A score of answers moves in steps, and is 0 for every model that a fault has taken down far enough; the loss of the right answer
still tells two such models apart. Nothing is generated: a pair is read in one forward pass, padded on the right, and only what
follows the prompt counts. The loss is the mean over those tokens, in nats; the end token of an answer is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shaketable.evaluate.decoding.dynamic import batches

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Reading:
    """One pair, read."""

    loss: float
    """Mean over the tokens after the prompt, in nats."""
    foreseen: float
    """Share of those tokens that the model held for the most likely ones."""


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    """An answer as the model should write it: its tokens and the end token."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], *end]


@torch.no_grad()
def read(model: Any, pairs: Sequence[Pair], batch_size: int, pad: int) -> list[Reading]:
    """Every pair, in the order given."""
    whole = [[*prompt, *rest] for prompt, rest in pairs]
    found: dict[int, Reading] = {}
    for indices in batches(whole, batch_size):
        ids, mask, counts = right_padded(whole, pairs, indices, pad, model.get_input_embeddings().weight.device)
        wanted, known = ids[:, 1:][counts], log_probs(model, ids, mask, counts)
        losses = -known.gather(-1, wanted.unsqueeze(-1)).squeeze(-1).double()
        right = (known.argmax(-1) == wanted).double()
        sizes = [len(pairs[i][1]) for i in indices]
        rows = zip(indices, losses.split(sizes), right.split(sizes), strict=True)
        found |= {i: Reading(float(loss.mean()), float(hit.mean())) for i, loss, hit in rows}
    return [found[i] for i in range(len(pairs))]


def log_probs(model: Any, ids: Tensor, mask: Tensor, read: Tensor) -> Tensor:
    """Of the tokens that `read` names, in float32."""
    logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, :-1][read].float().log_softmax(-1)


def right_padded(
    whole: list[list[int]], sequences: Sequence[tuple[Sequence[int], Sequence[int]]], indices: list[int], pad: int, device: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask, and which positions predict a token of a completion."""
    width = max(len(whole[i]) for i in indices)
    ids = [whole[i] + [pad] * (width - len(whole[i])) for i in indices]
    mask = [[1] * len(whole[i]) + [0] * (width - len(whole[i])) for i in indices]
    read = []
    for i in indices:
        prompt, completion = sequences[i]
        before = len(prompt) - 1
        read.append([False] * before + [True] * len(completion) + [False] * (width - 1 - before - len(completion)))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), torch.tensor(read, device=device)

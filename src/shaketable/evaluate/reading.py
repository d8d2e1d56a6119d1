"""Reading given tokens with teacher forcing: logits, loss, KL and agreement of (prompt, completion) pairs.

Everything that compares a model with a text or with another model goes through `pair_logits` and `read_pairs`: the loss of
right answers, the loss of texts, KL(clean‖faulty) in sweeps and while hardening, distillation and warm starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shaketable.evaluate.decoding import Progress, batches, padded, positions

Pair = tuple[Sequence[int], Sequence[int]]
"""A prompt and its completion, as tokens."""
Logits = Callable[[Sequence[Pair]], tuple[Tensor, Tensor]]
"""Logits (tokens, vocabulary) that predict the completions' tokens, and those tokens."""
AT_A_TIME = 1 << 24
"""Logits that are in float32 at any time."""


def pair_logits(model: Any, pairs: Sequence[Pair], pad: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Logits that predict the completions' tokens, and those tokens, row after row.

    Rows are padded on the right. With `left` they end together, so that only the last logits are made, which training needs.
    A fault that draws noise draws another one in each layout.
    """
    device = model.get_input_embeddings().weight.device
    rows = [[*p, *c] for p, c in pairs]
    if left:
        ids, mask = padded(rows, pad, device)
        answers, mine = padded([c for _, c in pairs], pad, device)
        masked = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
        out = model(input_ids=ids, use_cache=False, logits_to_keep=answers.shape[1] + 1, **masked).logits[:, :-1]
        own = torch.ones_like(answers, dtype=torch.bool) if mine is None else mine.bool()
        return out[own], answers[own]
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    place = torch.arange(width, device=device)
    ends = torch.tensor([[len(p), len(row)] for (p, _), row in zip(pairs, rows, strict=True)], device=device)
    wanted = ((place >= ends[:, :1]) & (place < ends[:, 1:]))[:, 1:]
    return model(input_ids=ids, attention_mask=mask).logits[:, :-1][wanted], ids[:, 1:][wanted]


def token_kl(clean: Tensor, other: Tensor) -> Tensor:
    """KL(clean‖other) of every token, from logits, in float32 and some tokens at a time."""
    rows = max(1, AT_A_TIME // clean.shape[-1])
    found = []
    for c, o in zip(clean.split(rows), other.split(rows), strict=True):
        c, o = c.float().log_softmax(-1), o.float().log_softmax(-1)
        p = c.exp()
        found.append((p * (c - o)).where(p > 0, 0.0).sum(-1))
    return torch.cat(found)


@dataclass(frozen=True)
class Reading:
    """One pair: sums over the tokens of its completion."""

    tokens: int
    loss: float
    """In nats."""
    foreseen: int
    """Tokens that the model held for the most likely ones."""
    kl: float
    """KL(reference‖model) in nats; 0 without a reference."""
    agree: int
    """Tokens whose most likely successor is that of the reference."""


@torch.no_grad()
def read_pairs(
    pairs: Sequence[Pair], batch_size: int, model: Logits, reference: Logits | None = None, progress: Progress | None = None
) -> list[Reading]:
    """Read every pair, beside a reference if there is one; results in the order given."""
    found: dict[int, Reading] = {}
    for indices in batches([[*p, *c] for p, c in pairs], batch_size):
        chosen = [pairs[i] for i in indices]
        expected = None if reference is None else reference(chosen)[0]
        logits, targets = model(chosen)
        top = logits.argmax(-1)
        columns = [
            torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none"),
            top == targets,
            torch.zeros(len(targets)) if expected is None else token_kl(expected, logits),
            torch.ones(len(targets)) if expected is None else top == expected.argmax(-1),
        ]
        sizes = [len(c) for _, c in chosen]
        rows = zip(*(column.cpu().double().split(sizes) for column in columns), strict=True)  # not every device has float64
        for i, size, row in zip(indices, sizes, rows, strict=True):
            loss, foreseen, kl, agree = (float(part.sum()) for part in row)
            found[i] = Reading(size, loss, round(foreseen), kl, round(agree))
        if progress is not None:
            progress(len(found), len(pairs))
    return [found[i] for i in range(len(pairs))]

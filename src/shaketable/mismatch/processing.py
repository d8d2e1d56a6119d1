"""What samplers do to logits before they draw: penalties, biases, temperature, top-k, top-p.

In the order of vLLM and of transformers. It is used twice: by the engine that is a Hugging Face model, and by the stage that
asks which of these steps are in log-probabilities that somebody returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shaketable.mismatch.engines.engine import Rollout, Sampling
from shaketable.mismatch.teacher_forcing import chosen

WIDER = 0.05
"""Of the probability: how much wider a nucleus is made to say that a token lies at its edge."""


def processed(logits: Tensor, sampling: Sampling, before: Sequence[Sequence[int]]) -> Tensor:
    """Logits (rows, vocabulary) as tokens are drawn from them, in float32 at least.

    Args:
        logits: The model's.
        sampling: What to do.
        before: The tokens before each row, which a repetition penalty needs.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.repetition_penalty != 1.0:
        x = _penalised(x, sampling.repetition_penalty, before)
    for token, bias in sampling.logit_bias.items():
        x = x.index_add(1, torch.tensor([token]), torch.full((len(x), 1), bias, dtype=x.dtype))
    if sampling.temperature not in (0.0, 1.0):
        x = x / sampling.temperature
    if 0 < sampling.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(sampling.top_k).values[:, -1:], -torch.inf)
    return x if sampling.top_p >= 1.0 else _nucleus(x, sampling.top_p)


def _penalised(x: Tensor, penalty: float, before: Sequence[Sequence[int]]) -> Tensor:
    x = x.clone()
    for row, tokens in enumerate(before):
        seen = torch.tensor(sorted(set(tokens)), dtype=torch.long)
        values = x[row, seen]
        x[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return x


def _nucleus(x: Tensor, top_p: float) -> Tensor:
    """The fewest tokens whose probabilities reach top_p; the one that crosses it belongs to them."""
    ordered, places = x.sort(-1, descending=True)
    p = ordered.softmax(-1)
    out = p.cumsum(-1) - p >= top_p
    return x.masked_fill(torch.zeros_like(out).scatter(1, places, out), -torch.inf)


def expected(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    """The log-probabilities that the engine should have returned, by the trainer's logits and the way it was asked."""
    if sampling.logprobs_mode == "raw":
        return chosen(logits, rollout.completion)
    return in_terms_of(logits, rollout, sampling)


def at_the_edge(logits: Tensor, rollout: Rollout, sampling: Sampling, own: Sequence[float]) -> list[bool]:
    """Which tokens lie just outside of a nucleus, where rounding may put them inside: a slightly wider one has them."""
    if sampling.logprobs_mode == "raw" or all(math.isfinite(x) for x in own):
        return [False] * len(own)
    k = sampling.top_k + 2 + sampling.top_k // 4 if sampling.top_k else 0
    wider = in_terms_of(logits, rollout, replace(sampling, top_p=min(1.0, sampling.top_p + WIDER), top_k=k))
    return [not math.isfinite(x) and math.isfinite(y) for x, y in zip(own, wider, strict=True)]


def in_terms_of(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    """Processed log-probabilities of a completion."""
    before = [[*rollout.prompt, *rollout.completion[:i]] for i in range(len(rollout.completion))]
    return chosen(processed(logits.double(), sampling, before), rollout.completion)

"""Log-probabilities of given completions: logits by teacher forcing, and the processing of a sampler before it draws.

Each way to batch, pad and decode computes the same in exact arithmetic, and rounds differently. One function serves the trainer
and an engine that is a Hugging Face model, so that no difference between them comes from here. Logits come rollout by rollout,
since a vocabulary times all tokens of a run does not fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shaketable.capture.decoder import masked, padded
from shaketable.mismatch.engine import Rollout, Sampling

WIDER = 0.05
"""Of the probability: how much wider a nucleus is made to find the tokens at its edge."""


@torch.no_grad()
def completion_logits(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    batch: int = 8,
    side: Literal["left", "right"] = "right",
    extra: int = 0,
    mode: AbstractContextManager[Any] | None = None,
) -> Iterator[Tensor]:
    """Logits (tokens of the completion, vocabulary) of each rollout, in their order, in the model's dtype.

    Rows are padded with `extra` columns beyond what the longest needs; every forward runs inside `mode`.
    """
    device = model.get_input_embeddings().weight.device
    for start in range(0, len(rollouts), batch):
        some = rollouts[start : start + batch]
        ids, mask = padded([r.tokens for r in some], side, extra)
        with mode if mode is not None else nullcontext():
            logits = model(input_ids=ids.to(device), **masked(mask.to(device)), use_cache=False).logits
        for row, rollout in enumerate(some):
            end = ids.shape[1] if side == "left" else len(rollout.tokens)
            yield logits[row, end - len(rollout.completion) - 1 : end - 1].cpu()


@torch.no_grad()
def decoded_logits(model: Any, rollouts: Sequence[Rollout], batch: int = 1) -> Iterator[Tensor]:
    """The same, token by token with the model's cache and padded on the left, as a sampler computes them."""
    device = model.get_input_embeddings().weight.device
    for first in range(0, len(rollouts), batch):
        some = rollouts[first : first + batch]
        ids, mask = padded([r.prompt for r in some])
        cache, rows, mask = None, [], mask.to(device)
        for step in range(max(len(r.completion) for r in some)):
            if step:
                ids = torch.tensor([[r.completion[step - 1] if step <= len(r.completion) else 0] for r in some])
                mask = torch.cat([mask, mask.new_ones(len(some), 1)], 1)
            given = masked(mask, ids.shape[1])
            out = model(input_ids=ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1, **given)
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


def prefixes(rollout: Rollout) -> list[list[int]]:
    """The tokens before each token of a completion."""
    return [[*rollout.prompt, *rollout.completion[:i]] for i in range(len(rollout.completion))]


def processed(logits: Tensor, sampling: Sampling, before: Sequence[Sequence[int]]) -> Tensor:
    """Logits (rows, vocabulary) as tokens are drawn from them, in float32 at least, by transformers' own processors.

    The order is that of vLLM and of transformers: penalty, temperature, top-k, top-p. A repetition penalty needs the tokens
    before each row.
    """
    from transformers.generation import logits_process as hf

    x = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.repetition_penalty != 1.0:
        longest = max(len(tokens) for tokens in before)
        seen = torch.tensor([[*tokens, *[tokens[0]] * (longest - len(tokens))] for tokens in before])
        x = hf.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(seen, x)
    if sampling.temperature not in (0.0, 1.0):
        x = hf.TemperatureLogitsWarper(float(sampling.temperature))(None, x)
    if 0 < sampling.top_k < x.shape[-1]:
        x = hf.TopKLogitsWarper(sampling.top_k)(None, x)
    return x if sampling.top_p >= 1.0 else hf.TopPLogitsWarper(sampling.top_p)(None, x)


def in_terms_of(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    """Processed log-probabilities of a completion."""
    return chosen(processed(logits.double(), sampling, prefixes(rollout)), rollout.completion)


def expected(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    """The log-probabilities that an engine with these logits should return under this sampling."""
    return chosen(logits, rollout.completion) if sampling.logprobs_mode == "raw" else in_terms_of(logits, rollout, sampling)


@dataclass(frozen=True)
class LogprobReading:
    """The log-probabilities of a model for all rollouts."""

    raw: list[list[float]]
    """Of the model's own logits."""
    meant: list[list[float]]
    """In the terms of the sampling, as an engine should return them."""
    edges: list[list[bool]]
    """Tokens just outside of a nucleus, where rounding may put them inside."""


def read(logits: Iterable[Tensor], rollouts: Sequence[Rollout], sampling: Sampling) -> LogprobReading:
    """Log-probabilities of the rollouts under a model's logits."""
    found = LogprobReading([], [], [])
    for x, rollout in zip(logits, rollouts, strict=True):
        found.raw.append(chosen(x, rollout.completion))
        found.meant.append(found.raw[-1] if sampling.logprobs_mode == "raw" else in_terms_of(x, rollout, sampling))
        found.edges.append(_at_the_edge(x, rollout, sampling, found.meant[-1]))
    return found


def _at_the_edge(logits: Tensor, rollout: Rollout, sampling: Sampling, own: Sequence[float]) -> list[bool]:
    """A token is at the edge of a nucleus when a slightly wider one has it."""
    if sampling.logprobs_mode == "raw" or all(math.isfinite(x) for x in own):
        return [False] * len(own)
    k = sampling.top_k + 2 + sampling.top_k // 4 if sampling.top_k else 0
    wider = in_terms_of(logits, rollout, replace(sampling, top_p=min(1.0, sampling.top_p + WIDER), top_k=k))
    return [not math.isfinite(x) and math.isfinite(y) for x, y in zip(own, wider, strict=True)]

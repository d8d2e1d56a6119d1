"""What an engine has to tell before it can be held against a trainer.

An engine samples, gives the log-probabilities of tokens it is shown, its weights and, operator by operator, what it read and
what it made. Everything is told in the trainer's terms: Hugging Face names of modules and parameters, fused ones split into
their parts, tensors on the CPU. So the stages know one engine only; one that cannot tell something raises `NotToldError`.

An operator call holds rows of tokens and no batch dimension. In `prefill` a row is a token of the whole sequence; in `decode`
the prompt is read first and a row is a token behind it, one pass each, put together. The kinds, with T rows and S positions
of the whole sequence; names are those of layer 3:

    embedding   ids (T)                                                  → (T, hidden)       model.embed_tokens
    rms_norm    x (T, hidden)                                            → (T, hidden)       model.layers.3.input_layernorm
    linear      x (T, in)                                                → (T, out)          model.layers.3.self_attn.q_proj
    rotary      x (T, heads, size), positions (T)                        → (T, heads, size)  model.layers.3.self_attn.rotary_q
    attention   q (T, heads, size), k, v (S, kv, size), positions (T)    → (T, heads·size)   model.layers.3.self_attn
    activation  x (T, inner), up (T, inner)                              → (T, inner)        model.layers.3.mlp.act_fn
    residual    x (T, hidden), residual (T, hidden)                      → (T, hidden)       model.layers.3.attention_residual
    router      x (T, hidden)                                            → (T, experts)      model.layers.3.mlp.gate
    experts     x (T, hidden)                                            → (T, hidden)       model.layers.3.mlp, as a whole
    lm_head     x (t, hidden)                                            → (t, vocabulary)   lm_head, at any rows
    log_softmax x (c, vocabulary), ids (c)                               → (c, 1)            log_softmax, of the completion

There are rotary_q and rotary_k, attention_residual and mlp_residual; an activation is act(x)·up.

A fused kernel is told as its parts where the parts can be seen, and as the last of them where they cannot: a norm that adds
first is told as `rms_norm` with `residual` beside `x`, and the sum, if the kernel gives it back, as a `residual` call. `k`
and `v` are what was made for the cache, not what was read from it: a cache that rounds shows in the attention that reads it.

log_softmax is what lies between the head and the number that is returned: logits of the row before each of the c tokens of the
completion, and the raw log-probability of that token, out of the same pass. A record of a prompt alone has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
ALONE, DECODE, DECODE_ALONE = "batch of one", "decode", "decode, batch of one"
CACHED, EAGER = "prefix cache", "graphs off"
"""Variants of an engine."""
KINDS = (
    *("embedding", "rms_norm", "linear", "rotary", "attention", "activation", "residual", "router", "experts", "lm_head"),
    "log_softmax",
)


class EngineError(ShaketableError):
    """The engine cannot be started, or died."""


class NotToldError(ShaketableError):
    """The engine cannot tell this; the message says why, and the verdict repeats it."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn, and which log-probabilities come back with them."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    seed: int = 0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of the model's own logits, or of what temperature, penalties, top-k and top-p made of them."""
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[int, ...] = ()
    """Token ids that end a completion; the one that did is its last token."""


@dataclass(frozen=True)
class Rollout:
    """A prompt, what was written after it, and the log-probability that the engine gave each token of it."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    """As the engine returned them, one for each token of the completion."""
    finish: Literal["stop", "length"] = "length"

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt, *self.completion]


@dataclass(frozen=True)
class OperatorCall:
    """What one operator read and made, on the CPU, in the engine's own dtypes."""

    name: str
    """The trainer's name of the module; see the table above."""
    kind: str
    layer: int | None
    inputs: dict[str, Tensor]
    output: Tensor


@dataclass(frozen=True)
class OperatorRecord:
    """The operators of one rollout in one phase."""

    calls: list[OperatorCall]
    prompt: list[OperatorCall] | None = None
    """In decode, those of reading the prompt, which went before."""
    changed_behind_head: bool = False
    """Whether the model changes logits behind its head: a soft cap, a scale, a bias."""


@dataclass(frozen=True)
class Routed:
    """Where one layer's router sends each token."""

    experts: Tensor
    """(T, k)."""
    weights: Tensor | None = None
    """(T, k), in the same order; None where the engine does not tell."""


def log_softmax_call(logits: Tensor, ids: Sequence[int], logprobs: Tensor) -> OperatorCall:
    """The last operator: logits of a completion's tokens, and the log-probabilities that were returned for them."""
    import torch

    inputs = {"x": logits, "ids": torch.tensor(list(ids))}
    return OperatorCall("log_softmax", "log_softmax", None, inputs, logprobs.unsqueeze(1))


class RolloutEngine(Protocol):
    """One sampler."""

    name: str
    """vllm, hf."""
    version: str
    dtype: torch.dtype
    """Of its activations."""
    together: int
    """Rollouts of one batch; an engine that records one at a time says 1."""

    def describe(self) -> dict[str, object]:
        """What it was started with, for the report."""

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Rollout]:
        """Draw one completion for each prompt."""

    def logprobs(self, rollouts: Sequence[Rollout], variant: str | None = None) -> list[list[float]]:
        """Raw log-probabilities of the completions' tokens, teacher-forced; as it does by default, or as one of `variants`."""

    def logits(self, rollouts: Sequence[Rollout]) -> Iterator[Tensor]:
        """Of the model itself, before each token of the completions, computed as it is when tokens are drawn."""

    def variants(self) -> list[str]:
        """Ways of computing the same that may round differently: 'batch of one', 'decode', 'prefix cache', 'graphs off', …"""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the trainer's names, fused ones split, on the CPU, in the dtype the engine holds them in."""

    def record(self, rollouts: Sequence[Rollout], phase: Phase, rows: Sequence[int] | None = None) -> list[OperatorRecord]:
        """Every operator on some of these rollouts, with the inputs it had in the engine's own run, in the order of the calls.

        Rollouts that are not among `rows` are computed with the others where the engine batches, and not recorded.
        """

    def routing(self, tokens: list[int]) -> dict[int, Routed] | None:
        """What every layer that has experts chose; None where the model has no experts."""

    def close(self) -> None:
        """End it. May be called twice."""

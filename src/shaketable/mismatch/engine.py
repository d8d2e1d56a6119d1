"""The interface of an inference engine that can be compared with a trainer.

An engine samples, gives the log-probabilities of given tokens, its weights and, operator by operator, the inputs and the result
of its own run. Everything comes in the trainer's terms: Hugging Face names of modules and parameters, fused ones split into
their parts, tensors on the CPU (`numerics/decoder_operators.py` has the table of operators). An engine that cannot give
something raises `UnavailableError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shaketable.capture.decoder import Phase
    from shaketable.mismatch.results import EngineFacts
    from shaketable.numerics.decoder_operators import OperatorCall

ALONE, DECODE, CACHED, EAGER = "batch of one", "decode", "prefix cache", "graphs off"
"""Variants of an engine."""


class EngineError(ShaketableError):
    """The engine cannot be started, or died."""


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
    stop: tuple[int, ...] = ()
    """Token ids that end a completion; the one that did is its last token."""


@dataclass(frozen=True)
class Rollout:
    """A prompt, what was written after it, and the log-probability that the engine gave each token of it."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    """As the engine returned them, one for each token of the completion."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt, *self.completion]


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
    """(T, k), in the same order; None where the engine does not give them."""


class RolloutEngine(Protocol):
    """One sampler."""

    name: str
    """vllm, hf."""
    version: str
    dtype: torch.dtype
    """Of its activations."""
    together: int
    """Rollouts of one batch; an engine that records one at a time says 1."""

    def describe(self) -> EngineFacts:
        """For the report."""

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

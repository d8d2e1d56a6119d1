"""The engine hf: a second Hugging Face model in this process, with another dtype, attention, batch, or compiled.

It is for people without an engine at hand, for questions between two Hugging Face settings (eager against sdpa, bfloat16
against float32) and for tests, which plant faults in a model of their own and hand it over. Sampling is a plain loop over the
model's cache: every step is visible, and speed does not matter for a few hundred tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from shaketable.capture.decoder import Phase, padded, record_batch
from shaketable.errors import ShaketableError, first_problem, nearest
from shaketable.mismatch.engine import ALONE, DECODE, EAGER, OperatorRecord, Rollout, Routed, Sampling
from shaketable.mismatch.logprobs import chosen, completion_logits, decoded_logits, processed
from shaketable.mismatch.results import EngineFacts
from shaketable.mismatch.routing import routing
from shaketable.numerics.decoder_operators import log_softmax_call


class HFArguments(BaseModel):
    """What `--engine-args` may hold for the engine hf."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    """Another checkpoint than the trainer's."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The checkpoint's own by default."""
    attention: str | None = None
    """eager or sdpa; the model's own choice by default."""
    device: str = "cpu"
    batch: int = Field(default=8, ge=1)
    """Rows of one forward."""
    compile: bool = False
    """Whether forwards go through torch.compile. Operators are recorded without it."""
    tf32: bool = False
    """Whether float32 products may be TF32, on CUDA."""


class HFEngine:
    """An engine that is a Hugging Face model."""

    name = "hf"
    chosen = staticmethod(chosen)
    """Log-probabilities of tokens under logits, by the trainer's formula, so that two equal models have no gap."""

    def __init__(self, model: Any, arguments: HFArguments | None = None) -> None:
        import transformers

        self.arguments = arguments or HFArguments()
        self.model = model.eval()
        self.called = torch.compile(model, dynamic=True) if self.arguments.compile else model
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.together = self.arguments.batch

    @classmethod
    def open(cls, model: str, arguments: Mapping[str, Any]) -> HFEngine:
        """Load the model that the arguments name."""
        from shaketable.models import check_device, load_model

        try:
            asked = HFArguments.model_validate(dict(arguments))
        except ValidationError as error:
            unknown = next((str(e["loc"][0]) for e in error.errors() if e["type"] == "extra_forbidden"), None)
            hint = "" if unknown is None else f"; {nearest(unknown, HFArguments.model_fields)}"
            raise ShaketableError(f"--engine-args: {first_problem(error)}{hint}") from None
        check_device(asked.device)
        if asked.tf32 and not asked.device.startswith("cuda"):
            raise ShaketableError(f"--engine-args: tf32 is for cuda, not {asked.device}")
        dtype = None if asked.dtype is None else getattr(torch, asked.dtype)
        loaded, _ = load_model(asked.model or model, device=asked.device, dtype=dtype)
        if "past_key_values" not in inspect.signature(loaded.forward).parameters:
            raise ShaketableError(f"the engine hf needs a cache of keys and values, and {type(loaded).__name__} has none")
        if asked.attention is not None:
            try:
                loaded.set_attn_implementation(asked.attention)
            except (ValueError, ImportError) as error:
                raise ShaketableError(f"--engine-args: attention: {str(error).splitlines()[0]}") from error
        return cls(loaded, asked)

    def describe(self) -> EngineFacts:
        """For the report."""
        given = self.arguments.model_dump(exclude_none=True) | {"attention": str(self.model.config._attn_implementation)}
        return EngineFacts(self.name, self.version, str(self.dtype).removeprefix("torch."), given)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Float32 products as this engine makes them; the trainer in this process makes its own."""
        was = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.arguments.tf32 or was
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = was

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Rollout]:
        """Draw one completion for each prompt."""
        generator = torch.Generator().manual_seed(sampling.seed)
        batches = [list(prompts[start : start + self.together]) for start in range(0, len(prompts), self.together)]
        with self._precision():
            return [rollout for batch in batches for rollout in self._batch(batch, sampling, generator)]

    def _batch(self, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator) -> list[Rollout]:
        device = self.model.get_input_embeddings().weight.device
        ids, mask = (t.to(device) for t in padded(prompts))
        drawn: list[list[tuple[int, float]]] = [[] for _ in prompts]
        ended, place, cache = [False] * len(prompts), (mask.cumsum(1) - 1).clamp_min(0), None
        for _ in range(sampling.max_new_tokens):
            out = self.called(input_ids=ids, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1].cpu()
            before = [[*p, *(token for token, _ in row)] for p, row in zip(prompts, drawn, strict=True)]
            tokens, logprobs = self._draw(logits, sampling, before, generator)
            for row, pair in enumerate(zip(tokens, logprobs, strict=True)):
                if not ended[row]:
                    drawn[row].append(pair)
                    ended[row] = pair[0] in sampling.stop
            if all(ended):
                break
            ids = torch.tensor(tokens, device=device).unsqueeze(1)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
            place = place[:, -1:] + 1
        return [
            Rollout(prompt, [token for token, _ in row], [logprob for _, logprob in row])
            for prompt, row in zip(prompts, drawn, strict=True)
        ]

    def logprobs(self, rollouts: Sequence[Rollout], variant: str | None = None) -> list[list[float]]:
        """Raw log-probabilities of the completions' tokens."""
        batch, model = 1 if variant == ALONE else self.together, self.model if variant == EAGER else self.called
        with self._precision():
            if variant == DECODE:
                logits = decoded_logits(model, rollouts, batch)
            else:
                logits = completion_logits(model, rollouts, batch=batch, side="left")
            return [self.chosen(one, r.completion) for r, one in zip(rollouts, logits, strict=True)]

    def logits(self, rollouts: Sequence[Rollout]) -> Iterator[Tensor]:
        """Before each token of the completions, as they were when it was drawn."""
        with self._precision():
            yield from decoded_logits(self.called, rollouts, self.together)

    def variants(self) -> list[str]:
        """Ways of computing the same."""
        return [ALONE, DECODE, *([EAGER] if self.arguments.compile else [])]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, tied ones under each of their names."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            yield name, parameter.detach().cpu()

    def record(self, rollouts: Sequence[Rollout], phase: Phase, rows: Sequence[int] | None = None) -> list[OperatorRecord]:
        """Every operator on some of these rollouts, all of them in one batch."""
        with self._precision():
            made = record_batch(self.model, [(r.prompt, r.completion) for r in rollouts], phase, rows)
        found = []
        for row, one in zip(range(len(rollouts)) if rows is None else rows, made, strict=True):
            completion = rollouts[row].completion
            calls = one.calls
            if completion:
                logprobs = torch.tensor(self.chosen(one.logits, completion), dtype=torch.float64)
                calls = [*calls, log_softmax_call(one.logits, completion, logprobs)]
            found.append(OperatorRecord(calls, one.prompt, not torch.equal(one.logits, one.head)))
        return found

    def routing(self, tokens: list[int]) -> dict[int, Routed] | None:
        """Chosen experts of every layer that has some."""
        with self._precision():
            return routing(self.model, tokens)

    def close(self) -> None:
        """Nothing to end."""

    def _draw(
        self, logits: Tensor, sampling: Sampling, before: list[list[int]], generator: torch.Generator
    ) -> tuple[list[int], list[float]]:
        """One token for each row, and the log-probability that is returned with it."""
        seen = processed(logits.double(), sampling, before)
        if sampling.temperature == 0:
            tokens = seen.argmax(-1)
        else:
            tokens = torch.multinomial(seen.softmax(-1), 1, generator=generator).squeeze(1)
        returned = seen if sampling.logprobs_mode == "processed" else logits.double()
        return tokens.tolist(), self.chosen(returned, tokens.tolist())

"""Trainers, engines and rollouts of the tests: nano, which ships with the package, loaded anew for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shaketable.capture.decoder import Phase, record_batch
from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.hf import HFEngine
from shaketable.mismatch.results import Mismatch
from shaketable.mismatch.stages import Question, run_stages
from shaketable.mismatch.trainer import Trainer
from shaketable.models import load_model, quieten
from shaketable.numerics.decoder_operators import OperatorCall


@cache
def trainer(dtype: torch.dtype = torch.float32) -> Trainer:
    quieten()
    model, tokenizer = load_model("nano", dtype=dtype)
    return RememberingTrainer(model, tokenizer, "nano")


def _key(rollouts: Sequence[Rollout]) -> tuple[Any, ...]:
    return tuple((tuple(r.prompt), tuple(r.completion)) for r in rollouts)


class RememberingTrainer(Trainer):
    """A trainer that computes the same tokens once: many cases differ in the returned numbers only."""

    def logits(self, rollouts, mode=None):
        how = None if mode is None else (mode.unit, mode.seed)
        return iter(_remembered(self, ("logits", how, _key(rollouts)), lambda: list(Trainer.logits(self, rollouts, mode))))

    def logprobs(self, rollouts, variant=None):
        return _remembered(self, (variant, _key(rollouts)), lambda: Trainer.logprobs(self, rollouts, variant))


class RememberingEngine(HFEngine):
    """An engine that computes the same tokens once."""

    def logits(self, rollouts):
        return iter(_remembered(self, ("logits", _key(rollouts)), lambda: list(HFEngine.logits(self, rollouts))))

    def logprobs(self, rollouts, variant=None):
        return _remembered(self, (variant, _key(rollouts)), lambda: HFEngine.logprobs(self, rollouts, variant))

    def record(self, rollouts, phase, rows=None):
        key = ("record", phase, None if rows is None else tuple(rows), _key(rollouts))
        return _remembered(self, key, lambda: HFEngine.record(self, rollouts, phase, rows))


def _remembered(owner: Any, key: Any, make: Callable[[], Any]) -> Any:
    known = owner.__dict__.setdefault("known", {})
    if key not in known:
        known[key] = make()
    return known[key]


def engine(dtype: torch.dtype = torch.float32, attention: str = "sdpa", plant: Callable[[Any], None] | None = None) -> HFEngine:
    quieten()
    model, _ = load_model("nano", dtype=dtype)
    model.set_attn_implementation(attention)
    if plant is not None:
        plant(model)
    return HFEngine(model)


def prompts(count: int = 6) -> list[list[int]]:
    tokenizer = trainer().tokenizer
    return [tokenizer(f"{a}+{a * 7 % 31}= what is the sum of {a}")["input_ids"] for a in range(1, count + 1)]


def sampling(**how: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 20, "stop": (trainer().tokenizer.eos_token_id,), **how})


def rollouts(other: HFEngine, how: Sampling | None = None, count: int = 6) -> list[Rollout]:
    return other.sample(prompts(count), how or sampling())


def verdict(other: HFEngine, how: Sampling | None = None, given: list[Rollout] | None = None, recorded: int = 2) -> Mismatch:
    """Every stage."""
    how = how or sampling()
    found = given if given is not None else rollouts(other, how)
    return run_stages(Question(trainer(), other, found, how, {}, recorded))


def record(model: Any, tokens: list[int], prompt_length: int, phase: Phase) -> list[OperatorCall]:
    """The operators of a model on one sequence."""
    return record_batch(model, [(tokens[:prompt_length], tokens[prompt_length:])], phase)[0].calls

"""The sampler compared with the trainer, every so many steps of a TRL training: `ShaketableCallback(mismatch_every=50)`.

A check comes right after completions were generated, when the sampler has the weights of this step. Who samples decides what
can be measured:

    vLLM in this process    all of it
    a vLLM server           gap and the trainer's own floor: its weights cannot be reached
    the model itself        gap, floor and share of decoding with a cache against reading; `generate` is asked for its own
                            scores, with random numbers that are restored. There are no second weights
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import padded
from shaketable.integrations.common.mismatch import ROLLOUTS, Budget, floor_and_share, gap, named, refuse_stale, weight_counts
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.hf.vllm_sampler import samples_with_vllm
from shaketable.mismatch.engine import Rollout, RolloutEngine, Sampling
from shaketable.mismatch.hf import HFEngine
from shaketable.mismatch.logprobs import read
from shaketable.mismatch.trainer import Trainer
from shaketable.mismatch.weights import compare

METHOD = "_generate_and_score_completions"


class MismatchCheck:
    """The check of one training.

    Args:
        trainer: TRL's.
        every: Steps from one check to the next; the first step has one.
        stop: Whether weights that differ after a sync end the training.
    """

    def __init__(self, trainer: Any, every: int, stop: bool) -> None:
        if not hasattr(trainer, METHOD):
            raise ShaketableError(f"mismatch_every needs a trainer of TRL that samples; {type(trainer).__name__} does not")
        _refuse_parts(trainer)
        self.trainer, self.every, self.stop = trainer, every, stop
        self.engine = _engine(trainer)
        if stop and self.engine is None:
            raise ShaketableError("mismatch_stop needs the sampler's weights, and a vLLM server does not show them")
        self.newest: dict[str, float] = {}
        """Numbers of the last check, until they are logged."""
        self.budget = Budget()
        self._checked: int | None = None
        self.undo = wrap_once(trainer, METHOD, self._generate_and_check)
        """Give the trainer its own method back."""

    def logged(self) -> dict[str, float]:
        """New numbers since the last call."""
        found, self.newest = self.newest, {}
        return found

    def _generate_and_check(self, generate: Callable[[Any], Any], batch: Any) -> Any:
        made = generate(batch)
        step = self.trainer.state.global_step
        if self.trainer.model.training and step % self.every == 0 and step != self._checked:
            self._checked = step
            spent = self.budget.spent
            with self.budget.spending(), _reading(self.trainer.model), torch.no_grad():
                found = self._look(made, step)
            self.newest = named(found | {"seconds": self.budget.spent - spent})
        return made

    def _look(self, made: dict[str, Any], step: int) -> dict[str, float]:
        side = Trainer(self.trainer.accelerator.unwrap_model(self.trainer.model), None, "trainer")
        rollouts, sampling = self._rollouts(made, side)
        if not rollouts:  # every completion was truncated and masked
            return self._weights(side, step)
        meant = read(side.logits(rollouts), rollouts, sampling).meant
        found = gap([r.logprobs for r in rollouts], meant) | self._weights(side, step)
        return found | floor_and_share(side, self.engine, rollouts) if self.budget.is_left else found

    def _rollouts(self, made: dict[str, Any], side: Trainer) -> tuple[list[Rollout], Sampling]:
        sampling = Sampling(1, temperature=self.trainer.temperature, logprobs_mode="processed")
        if "sampling_per_token_logps" in made:
            return _of_batch(made), sampling
        prompts = [_kept(ids, mask) for ids, mask in zip(made["prompt_ids"], made["prompt_mask"], strict=True)][:ROLLOUTS]
        return _generated(side.model, prompts, self.trainer.generation_config), sampling

    def _weights(self, side: Trainer, step: int) -> dict[str, float]:
        if self.engine is None or isinstance(self.engine, HFEngine):
            return {}
        own = dict(side.model.named_parameters(remove_duplicate=False))
        found = compare(own, self.engine.parameters(), self.engine.dtype)
        if self.stop:
            refuse_stale(found, step)
        return weight_counts(found)


def _refuse_parts(trainer: Any) -> None:
    """The weights must be whole, and under their own names."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise ShaketableError("mismatch_every cannot tell adapters from what a sampler merged them into; train all weights")
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ShaketableError("mismatch_every needs whole weights on every rank, and these are sharded (FSDP)")


def _engine(trainer: Any) -> RolloutEngine | None:
    """The sampler as an engine; None for a server, whose inside cannot be reached."""
    if not samples_with_vllm(trainer):
        return HFEngine(trainer.accelerator.unwrap_model(trainer.model))
    generation = trainer.vllm_generation
    if generation.mode == "server":
        return None
    if generation.enable_sleep_mode:
        raise ShaketableError("vLLM's sleep mode puts its weights away behind every rollout; set vllm_enable_sleep_mode=False")
    from shaketable.integrations.vllm.engine import VLLMEngine
    from shaketable.integrations.vllm.observe import observe

    generation.llm.collective_rpc(observe)
    return VLLMEngine(generation.llm, {})


@contextmanager
def _reading(model: Any) -> Iterator[None]:
    """Eval mode inside."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def _of_batch(made: dict[str, Any]) -> list[Rollout]:
    """Completions and the sampler's own log-probabilities from TRL's newest batch."""
    found = []
    for row in range(len(made["prompt_ids"])):
        completion = _kept(made["completion_ids"][row], made["completion_mask"][row])
        logprobs = made["sampling_per_token_logps"][row][: len(completion)].tolist()
        if completion and all(x == x for x in logprobs):
            found.append(Rollout(_kept(made["prompt_ids"][row], made["prompt_mask"][row]), completion, logprobs))
    return found[:ROLLOUTS]


def _kept(ids: Any, mask: Any) -> list[int]:
    found: list[int] = ids[mask.bool()].tolist()
    return found


def _generated(model: Any, prompts: list[list[int]], config: Any) -> list[Rollout]:
    """A few completions of `generate` with its own scores; random numbers are as before."""
    asked = copy.deepcopy(config)
    asked.output_scores = asked.return_dict_in_generate = True
    ids, mask = padded(prompts, int(asked.pad_token_id or 0), model.device)
    with torch.random.fork_rng():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask, generation_config=asked
        )
    scores = torch.stack(out.scores, 1).double().log_softmax(-1)
    return [
        Rollout(list(prompt), completion, [float(scores[row, i, t]) for i, t in enumerate(completion)])
        for row, prompt in enumerate(prompts)
        if (completion := _ended(out.sequences[row, ids.shape[1] :].tolist(), asked.eos_token_id))
    ]


def _ended(tokens: list[int], end: int | list[int] | None) -> list[int]:
    """The tokens up to the first that ends a completion; the rest is padding."""
    ends = end if isinstance(end, list) else [end]
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]

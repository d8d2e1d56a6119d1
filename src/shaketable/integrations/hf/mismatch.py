"""The sampler compared with the trainer, every so many steps of a TRL training: `ShaketableCallback(mismatch_every=50)`.

A check comes right after vLLM generated completions, when it has the weights of this step. Floor and share take most of the
time, and are measured in the first check. Of a vLLM server there are the gap and the trainer's own floor: its weights cannot be
reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import ROLLOUTS, floor, gap, largest_share, named, refuse_stale, weight_counts
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.hf.vllm_sampler import samples_with_vllm
from shaketable.mismatch.engine import Rollout, RolloutEngine, Sampling
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
        if not hasattr(trainer, METHOD) or not samples_with_vllm(trainer):
            raise ShaketableError("mismatch_every needs a trainer of TRL that samples with vLLM (use_vllm=True)")
        _refuse_parts(trainer)
        self.trainer, self.every, self.stop = trainer, every, stop
        self.engine = _engine(trainer)
        if stop and self.engine is None:
            raise ShaketableError("mismatch_stop needs the sampler's weights, and a vLLM server does not show them")
        self.newest: dict[str, float] = {}
        """Numbers of the last check, until they are logged."""
        self._checked: int | None = None
        self._has_floor = False
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
            self.trainer.model.eval()
            try:
                with torch.no_grad():
                    self.newest = named(self._look(made, step))
            finally:
                self.trainer.model.train()
        return made

    def _look(self, made: dict[str, Any], step: int) -> dict[str, float]:
        side = Trainer(self.trainer.accelerator.unwrap_model(self.trainer.model), None, "trainer")
        rollouts = _of_batch(made)
        if not rollouts:  # every completion was truncated and masked
            return self._weights(side, step)
        sampling = Sampling(1, temperature=self.trainer.temperature, logprobs_mode="processed")
        meant = read(side.logits(rollouts), rollouts, sampling).meant
        found = gap([r.logprobs for r in rollouts], meant) | self._weights(side, step)
        if not self._has_floor:
            self._has_floor = True
            found["floor"] = floor(side, self.engine, rollouts)
            found |= {} if self.engine is None else largest_share(side, self.engine, rollouts)
        return found

    def _weights(self, side: Trainer, step: int) -> dict[str, float]:
        if self.engine is None:
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
    generation = trainer.vllm_generation
    if generation.mode == "server":
        return None
    if generation.enable_sleep_mode:
        raise ShaketableError("vLLM's sleep mode puts its weights away behind every rollout; set vllm_enable_sleep_mode=False")
    from shaketable.integrations.vllm.engine import VLLMEngine
    from shaketable.integrations.vllm.observe import observe

    generation.llm.collective_rpc(observe)
    return VLLMEngine(generation.llm, {})


def _of_batch(made: dict[str, Any]) -> list[Rollout]:
    """Completions and the sampler's own log-probabilities from TRL's newest batch."""
    if "sampling_per_token_logps" not in made:
        raise ShaketableError("mismatch_every needs vLLM's log-probabilities: vllm_importance_sampling_correction=True")
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

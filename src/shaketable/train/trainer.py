"""TRL's GRPOTrainer with a sampler of our own, and meters on what faults in the sampler do to training.

Sampling is in the phase `rollout`, with tokens drawn from a generator that is keyed by (seed, step, rank). It returns the
log-probabilities of the tokens *as the sampler saw them*, faults, AQN and all. They are compared with the trainer's, which the
loss computes anyway: KL(sampler‖trainer), the tail of the importance ratio, and, when asked for, truncated importance sampling,
by weighting each token's advantage with min(ratio, cap). TRL corrects for its sampler only when that is vLLM; the formula is
the same.

A step's global random state is set from (seed, step) too (TRL shuffles a batch with it), so a step is a function of weights,
optimizer and step number, and a resumed run is the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.score import arithmetic
from shaketable.faults.rng import key_of
from shaketable.sites.phases import phase
from shaketable.train.checkpoints import writing
from shaketable.train.config import TrainConfig

TAIL = 2.0
"""Ratios above this are the tail."""


@dataclass
class SamplerMismatch:
    """How far sampler and trainer are apart, over the tokens of one step."""

    log_ratios: list[Tensor] = field(default_factory=list)
    """log of trainer over sampler probability, of every sampled token."""

    def summary(self) -> dict[str, float]:
        """Estimates from samples of the sampler: KL by ρ − 1 − log ρ, which is unbiased and never negative."""
        if not self.log_ratios:
            return {}
        logs = torch.cat(self.log_ratios).double()
        ratio = logs.exp()
        return {
            "kl_sampler_trainer": float((ratio - 1 - logs).mean()),
            "ratio_max": float(ratio.max()),
            "ratio_p99": float(ratio.float().quantile(0.99)) if len(ratio) < 2**24 else float(ratio.max()),
            "ratio_tail": float((ratio > TAIL).double().mean()),
        }


class FaultyGRPO(GRPOTrainer):  # type: ignore[misc]
    """GRPO whose sampler may run under faults."""

    def __init__(self, *, decoder: Decoder, key: int, cap: float | None, dtype: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.decoder = decoder
        self.key = key
        self.cap = cap
        self.dtype = dtype
        self.mismatch = SamplerMismatch()
        self.sampling_seconds = 0.0
        self.sampled_tokens = 0
        self._batch: dict[str, Any] | None = None

    def begin_step(self) -> None:
        """Empty the meters, and make all randomness of the step a function of its number."""
        self.mismatch = SamplerMismatch()
        self.sampling_seconds, self.sampled_tokens = 0.0, 0
        torch.manual_seed(key_of(self.key, "step", self.state.global_step))

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        start = time.perf_counter()
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        prompts, samples = _groups(prompt_ids)
        key = key_of(self.key, "sampling", self.state.global_step, self.accelerator.process_index)
        generator = torch.Generator(device=self.accelerator.device).manual_seed(key >> 1)
        try:
            with phase("rollout"), arithmetic(self.accelerator.device.type, self.dtype):
                found = self.decoder.decode(model, prompts, samples=samples, generator=generator)
        finally:
            model.train(was_training)
        self.sampling_seconds += time.perf_counter() - start
        self.sampled_tokens += sum(len(c.tokens) for c in found)
        return [c.tokens for c in found], [c.logprobs for c in found]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._batch = dict(inputs)
        try:
            loss: Tensor = super()._compute_loss(model, self._batch)
        finally:
            self._batch = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._batch is not None:
            self._compare(found[0].detach(), self._batch)
        return found

    def _compare(self, trainer: Tensor, batch: dict[str, Any]) -> None:
        mask = batch["completion_mask"].bool()
        log_ratio = (trainer - batch["sampling_per_token_logps"]).masked_fill(~mask, 0.0)
        self.mismatch.log_ratios.append(log_ratio[mask].cpu())
        if self.cap is not None:
            batch["advantages"] = batch["advantages"].unsqueeze(1) * log_ratio.exp().clamp_max(self.cap)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with writing(f"checkpoint-{self.state.global_step}", Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: a checkpoint is weights and state."""


def grpo_config(config: TrainConfig, out: Path, limit: int) -> GRPOConfig:
    """TRL's configuration for a run."""
    micro = config.micro_batch or config.batch
    return GRPOConfig(
        output_dir=str(out),
        max_steps=config.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=config.batch // micro,
        num_generations=config.samples,
        max_completion_length=limit,
        temperature=config.temperature,
        beta=config.beta,
        loss_type=config.loss,
        learning_rate=config.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.warmup,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        shuffle_dataset=False,
        bf16=config.dtype == "bfloat16",
        use_cpu=config.device == "cpu",
        gradient_checkpointing=False,
        dataloader_pin_memory=config.device != "cpu",
        logging_steps=1,
        disable_tqdm=True,
        report_to=list(config.report_to),
        save_steps=config.save_steps,
        remove_unused_columns=False,
    )


def _groups(prompt_ids: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], int]:
    """Each prompt once, and how many rows it has; every row by itself where the groups are not equal."""
    runs = [(list(prompt), len(list(rows))) for prompt, rows in groupby(prompt_ids)]
    sizes = {size for _, size in runs}
    return ([p for p, _ in runs], sizes.pop()) if len(sizes) == 1 else (list(prompt_ids), 1)

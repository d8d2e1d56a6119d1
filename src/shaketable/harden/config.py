"""What `shaketable harden` is asked to do. Imports no torch.

A frozen model, like that of `train`: resolved once, written into the run record, read from there when a run resumes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shaketable.errors import nearest
from shaketable.train.config import RunConfig

RUNGS = ("calibrate", "rescale", "distil", "supervise", "reinforce")
"""Stages, in the order in which they are done."""
TRAINED = ("distil", "supervise")
"""Those that take optimizer steps."""


class HardenConfig(RunConfig):
    """One hardening run."""

    task: str | None = None
    """arithmetic, gsm8k, a .jsonl or .parquet file, or my_tasks.py:Class (its code is run); trains on its train problems,
    scores on its test problems."""
    prompts: str | None = None
    """Instead of a task: a text file, or a .jsonl file with one prompt per line; scored by agreement with the clean model."""
    plans: tuple[str, ...] = ()
    """The fault to harden against: a plan or its YAML file; repeat it for several. A study may give none, as a control."""
    rungs: tuple[str, ...] = ("calibrate", "rescale", "distil")
    """Which of calibrate, rescale, distil, supervise and reinforce are tried, cheapest first."""
    target: float | None = Field(default=0.8, ge=0, le=1)
    """Stop once this share of the loss is recovered under every plan, 0 to 1; a study runs all stages."""

    steps: int = Field(default=200, ge=1, le=10_000_000)
    """Optimizer steps of distil, and again of supervise."""
    batch: int = Field(default=64, ge=1)
    """Sequences per step."""
    micro_batch: int = Field(default=0, ge=0)
    """Sequences per forward and backward pass; 0 takes a whole step at once."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate, falling to 0; by default 3e-4 below 300 million parameters, 1e-4 below a billion, 1e-5 above, and ten
    times that with LoRA."""
    clean_every: int = Field(default=2, ge=0)
    """One step in this many is without the fault, so that the model stays good on healthy hardware; 0 turns this off."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest completion of --prompts; a task has its own limit."""
    checkpointing: bool = False
    """Save memory: recompute activations in the backward pass."""
    clean_loss: float = Field(default=0.02, ge=0, le=1)
    """Largest loss of clean score that calibrate, rescale and reinforce may cause; beyond it they are undone. 1 allows any."""
    reinforce_steps: int = Field(default=30, ge=1)
    """GRPO steps of the stage reinforce."""
    reinforce_beta: float = Field(default=0.04, ge=0)
    """Weight of the KL to the hardened model in GRPO."""

    score: Literal["auto", "accuracy", "agreement"] = "auto"
    """accuracy, or agreement of the most likely tokens with the clean model's; auto takes accuracy if there is a task."""
    eval_n: int = Field(default=256, ge=2)
    """Test problems, drawn at random."""
    calibrate_n: int = Field(default=64, ge=4)
    """Sequences that calibrate and rescale look at."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 means a quarter of the steps."""

    @field_validator("rungs", mode="before")
    @classmethod
    def _with_new_names(cls, rungs: Any) -> Any:
        """Records and studies that were written before rescale had its name."""
        return tuple("rescale" if rung == "regauge" else rung for rung in rungs) if isinstance(rungs, list | tuple) else rungs

    @model_validator(mode="after")
    def _fits_together(self) -> HardenConfig:
        if (self.task is None) == (self.prompts is None):
            raise ValueError("name a task or a file of prompts, one of the two")
        for rung in self.rungs:
            if rung not in RUNGS:
                raise ValueError(f"there is no stage {rung!r}; {nearest(rung, RUNGS)}")
        if self.task is None and (needs := [r for r in ("supervise", "reinforce") if r in self.rungs]):
            raise ValueError(f"{needs[0]} needs a task with answers; prompts have none")
        if self.task is None and self.score == "accuracy":
            raise ValueError("prompts have no answers, so there is no accuracy; leave score out")
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {self.batch} sequences of a step")
        if self.lora and (clash := [r for r in ("calibrate", "reinforce") if r in self.rungs]):
            raise ValueError(f"{clash[0]} changes the weights that LoRA leaves as they are; drop it from rungs, or drop lora")
        if not self.plans and (idle := [r for r in ("calibrate", "rescale", "reinforce") if r in self.rungs]):
            raise ValueError(f"{idle[0]} needs a plan; without one only distil and supervise have something to do")
        if not self.plans and not self.conditions:
            raise ValueError("name at least one plan to harden against")
        return self

    @property
    def climbed(self) -> tuple[str, ...]:
        """The stages, each once, in their order."""
        return tuple(r for r in RUNGS if r in self.rungs)

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.steps // 4)

"""What `shaketable harden` is asked to do. Imports no torch.

A frozen model, like that of `train`: resolved once, written into the run record, read from there when a run resumes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shaketable.errors import ShaketableError, nearest
from shaketable.train.config import RunConfig

STAGES = ("distil", "supervise")
"""In the order in which they are done."""
REMOVED_STAGES = ("calibrate", "rescale", "regauge", "reinforce")
"""Published records name them."""
REMOVED_OPTIONS: dict[str, Any] = {"calibrate_n": 64, "reinforce_steps": 30, "reinforce_beta": 0.04}
"""Options of published records, with the values that the names of their runs depend on."""


class HardenConfig(RunConfig):
    """One hardening run."""

    task: str | None = None
    """arithmetic, gsm8k, a .jsonl or .parquet file, or my_tasks.py:Class (its code is run); trains on its train problems,
    scores on its test problems."""
    prompts: str | None = None
    """Instead of a task: a text file, or a .jsonl file with one prompt per line; scored by agreement with the clean model."""
    plans: tuple[str, ...] = ()
    """The fault to harden against: a plan or its YAML file; repeat it for several. A study may give none, as a control."""
    rungs: tuple[str, ...] = ("distil",)
    """The stages: distil, supervise, or both."""
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

    score: Literal["auto", "accuracy", "agreement"] = "auto"
    """accuracy, or agreement of the most likely tokens with the clean model's; auto takes accuracy if there is a task."""
    eval_n: int = Field(default=256, ge=2)
    """Test problems, drawn at random."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 means a quarter of the steps."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_options(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in (*REMOVED_OPTIONS, "clean_loss")}

    @model_validator(mode="after")
    def _fits_together(self) -> HardenConfig:
        if (self.task is None) == (self.prompts is None):
            raise ValueError("name a task or a file of prompts, one of the two")
        if unknown := [r for r in self.rungs if r not in STAGES + REMOVED_STAGES]:
            raise ValueError(f"there is no stage {unknown[0]!r}; {nearest(unknown[0], STAGES)}")
        if self.task is None and "supervise" in self.rungs:
            raise ValueError("supervise needs a task with answers; prompts have none")
        if self.task is None and self.score == "accuracy":
            raise ValueError("prompts have no answers, so there is no accuracy; leave score out")
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {self.batch} sequences of a step")
        if not self.plans and not self.conditions:
            raise ValueError("name at least one plan to harden against")
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages, each once, in their order; raises for one that was removed since the configuration was written."""
        if removed := [r for r in self.rungs if r in REMOVED_STAGES]:
            raise ShaketableError(f"the stage {removed[0]} was removed; the stages are {' and '.join(STAGES)}")
        return tuple(stage for stage in STAGES if stage in self.rungs)

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.steps // 4)

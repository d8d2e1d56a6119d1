"""What `shaketable harden` is asked to do. Imports no torch.

A frozen model, like that of `train`: resolved once, written into the run record, read from there when a run resumes.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from shaketable.errors import ShaketableError
from shaketable.train.config import RunConfig

STAGE = "distil"
REMOVED_OPTIONS: dict[str, Any] = {
    "calibrate_n": 64,
    "reinforce_steps": 30,
    "reinforce_beta": 0.04,
    "target": None,
    "score": "auto",
}
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
    rungs: tuple[str, ...] = (STAGE,)
    """distil; a control arm of a study has none. Published records name stages that were removed."""

    steps: int = Field(default=200, ge=1, le=10_000_000)
    """Optimizer steps."""
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
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {self.batch} sequences of a step")
        if not self.plans and not self.conditions:
            raise ValueError("name at least one plan to harden against")
        return self

    def check_stages(self) -> None:
        """Refuse a stage that was removed since the configuration was written."""
        if unknown := [stage for stage in self.rungs if stage != STAGE]:
            raise ShaketableError(f"there is no stage {unknown[0]!r} in this version; the only one is {STAGE}")

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.steps // 4)

"""What `shaketable harden` is asked to do. Imports no torch.

A frozen model, like that of `train`: resolved once, written into the run record, read from there when a run goes on.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shaketable.errors import ShaketableError, first_problem, nearest

RUNGS = ("calibrate", "regauge", "distil", "supervise", "reinforce")
"""In the order in which they are climbed."""
TRAINED = ("distil", "supervise")
"""Those that take optimizer steps."""


class HardenConfig(BaseModel):
    """One run of the ladder."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    task: str | None = None
    """Problems to solve: their train side is learnt from, their test side is scored."""
    prompts: str | None = None
    """A text or .jsonl file of prompts, for who has no task: the score is then agreement with the clean model."""
    plans: tuple[str, ...] = ()
    """What the model must stand: one is drawn for every step. None at all trains without a fault, as a control."""
    rungs: tuple[str, ...] = ("calibrate", "regauge", "distil")
    target: float | None = Field(default=0.8, ge=0, le=1)
    """Stop when this share of the loss is back under every plan; climb all rungs when None."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Keys the prompts, the clean model's completions and all noise."""

    steps: int = Field(default=200, ge=1, le=10_000_000)
    """Optimizer steps of distil, and of supervise."""
    batch: int = Field(default=64, ge=1)
    """Sequences per step."""
    micro_batch: int = Field(default=0, ge=0)
    """Sequences per forward and backward; all of a step at once when 0."""
    lr: float | None = Field(default=None, gt=0)
    """Falls to 0 in a line. None chooses by size: 3e-4 below 300 million parameters, 1e-4 below a billion, 1e-5 above; times
    ten with LoRA."""
    clean_every: int = Field(default=2, ge=0)
    """Every so many steps one is without the fault, so that the model stays good on healthy hardware; never when 0."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the clean model's completions."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Length of the completions of `prompts`; a task has its own."""
    lora: int = Field(default=0, ge=0, le=1024)
    """Rank of LoRA adapters, merged at the end; 0 trains all weights. The teacher is then the model without them: no copy."""
    checkpointing: bool = False
    """Keep fewer activations and compute them again in the backward pass."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    reinforce_steps: int = Field(default=30, ge=1)
    reinforce_beta: float = Field(default=0.04, ge=0)
    """Weight of the KL to the hardened model in GRPO."""
    warm_start: int = Field(default=0, ge=0, le=100_000)
    """Supervised steps on the task's own answers before anything else, as in `train`: the clean model is the one after them."""

    score: Literal["auto", "accuracy", "agreement"] = "auto"
    """`accuracy` of a task's answers, or `agreement` of the most likely tokens with the clean model's; accuracy with a task."""
    eval_n: int = Field(default=256, ge=2)
    eval_seed: int = Field(default=0, ge=0)
    """Draws the test problems; keys the noise that they are scored under."""
    eval_batch: int = Field(default=0, ge=0)
    """Problems at a time; what fits when 0."""
    eval_plans: tuple[str, ...] = ()
    """Score under these as well: what carries over to faults that were not trained on."""
    conditions: dict[str, str] | None = None
    """Plans to be scored under, by name, in place of the above; their noise depends on the run's seed too."""
    mechanism: bool = False
    """Read gradient norms and activations per layer, under every condition, before the first rung and after the last."""
    calibrate_n: int = Field(default=64, ge=4)
    """Sequences that calibrate and regauge look at."""
    save_every: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; a quarter of the steps when 0."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the run; weights and optimizer are float32 either way."""

    @model_validator(mode="after")
    def _fits_together(self) -> HardenConfig:
        if (self.task is None) == (self.prompts is None):
            raise ValueError("name a task or a file of prompts, one of the two")
        for rung in self.rungs:
            if rung not in RUNGS:
                raise ValueError(f"there is no rung {rung!r}; {nearest(rung, RUNGS)}")
        if self.task is None and (needs := [r for r in ("supervise", "reinforce") if r in self.rungs]):
            raise ValueError(f"{needs[0]} needs a task with answers; prompts have none")
        if self.task is None and self.score == "accuracy":
            raise ValueError("prompts have no answers, so there is no accuracy; leave score out")
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {self.batch} sequences of a step")
        if self.lora and (clash := [r for r in ("calibrate", "reinforce") if r in self.rungs]):
            raise ValueError(f"{clash[0]} changes the weights that LoRA leaves as they are; drop it from rungs, or drop lora")
        if self.lora and self.warm_start:
            raise ValueError("a warm start trains all weights, and lora leaves them as its base has them; drop one of the two")
        if not self.plans and not self.conditions:
            raise ValueError("name at least one plan to harden against")
        return self

    @property
    def climbed(self) -> tuple[str, ...]:
        """The rungs, each once, in the order of the ladder."""
        return tuple(r for r in RUNGS if r in self.rungs)

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.steps // 4)

    @classmethod
    def checked(cls, **fields: Any) -> HardenConfig:
        """The configuration, or one line that says what is wrong with it."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ShaketableError(first_problem(error)) from None

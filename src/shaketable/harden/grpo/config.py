"""What `shaketable train` is asked to do. Imports no torch.

A frozen model whose fields are the command's options; it is resolved once (defaults that depend on the model filled in),
written into the run record, and a resumed run reads it from there instead of from the command line.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shaketable.io.config_model import ConfigModel

PLAN_IN: dict[str, tuple[str, ...]] = {"both": ("rollout", "train"), "rollout": ("rollout",), "loss": ("train",), "eval": ()}
"""Where the plan acts in training, and the phases that means."""


class TrainConfig(ConfigModel):
    """One training run."""

    model: str
    task: str
    steps: int = Field(ge=1, le=10_000_000)
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Keys the problems, their order, the sampling and all noise."""
    plan: str | None = None
    """The plan, in one line; a file's plan is written out here."""
    plan_seed: int | None = None
    """The plan's own seed; the run's when None."""
    plan_in: Literal["both", "rollout", "loss", "eval"] = "both"
    aqn: str | None = None
    """AQN, as one line or as the path of its YAML file."""
    tis: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: the cap of trainer over sampler probability; off when None."""

    warm_start: int = Field(default=0, ge=0, le=100_000)
    """Supervised steps on the task's own answers before the run, the same for every arm and seed; none when 0."""
    prompts: int = Field(default=16, ge=1)
    """Problems per step."""
    samples: int = Field(default=8, ge=2)
    """Answers to each problem: the group that rewards are compared in."""
    micro_batch: int = Field(default=0, ge=0)
    """Answers per forward and backward of the loss; all of a step at once when 0."""
    lr: float | None = Field(default=None, gt=0)
    """None chooses by size: 1e-4 below ten million parameters, 2e-5 above (2e-4 with LoRA)."""
    temperature: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the first policy."""
    loss: str = "dapo"
    """TRL's loss_type."""
    lora: int = Field(default=0, ge=0, le=1024)
    """Rank of LoRA adapters; 0 trains all weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up; the rate is constant afterwards."""

    eval_every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; at the first and the last always, and only there when 0."""
    eval_n: int = Field(default=200, ge=1)
    eval_seed: int = Field(default=0, ge=0)
    """Draws the test problems: the same in every arm of a study."""
    eval_plans: tuple[str, ...] = ()
    """Further conditions to evaluate under, beside clean and the plan."""
    eval_batch: int = Field(default=0, ge=0)
    """Problems at a time; what fits when 0. Noise is keyed by the call, so a study fixes it."""
    conditions: dict[str, str] | None = None
    """Plans to be scored under, by name, in place of the plan and `eval_plans`; their noise depends on the run's seed too."""
    mechanism: bool = False
    """Read gradient norms and activations per layer, under every condition, before the first step and after the last."""
    save_every: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; a tenth of the run when 0."""
    decoding: Literal["auto", "dynamic", "static"] = "auto"
    """How rollouts are decoded: `static` keeps its memory in place, so that a GPU can replay a step; `auto` is that on CUDA."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the run; weights and optimizer are float32 either way."""
    report_to: tuple[str, ...] = ("tensorboard",)

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        total = self.prompts * self.samples
        if self.micro_batch and total % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {total} answers of a step")
        if self.plan is None and self.plan_in != "both":
            raise ValueError(f"plan_in={self.plan_in} needs a plan")
        if self.conditions is not None and (self.eval_plans or self.plan_in == "eval"):
            raise ValueError("conditions stand in place of eval_plans and of plan_in=eval; give one or the other")
        if self.warmup >= self.steps and self.warmup:
            raise ValueError(f"a warm-up of {self.warmup} steps leaves nothing of a run of {self.steps}")
        if self.warm_start and self.lora:
            raise ValueError("a warm start trains all weights, and lora leaves them as its base has them; drop one of the two")
        return self

    @property
    def batch(self) -> int:
        """Answers per step."""
        return self.prompts * self.samples

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints."""
        return self.save_every or max(1, self.steps // 10)

    def evaluates_at(self, step: int) -> bool:
        """Whether a step is followed by an evaluation. The first and the last always are."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

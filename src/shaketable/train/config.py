"""What `shaketable train` is asked to do. Imports no torch.

A frozen model whose fields are the command's options; it is resolved once (defaults that depend on the model filled in),
written into the run record, and a resumed run reads it from there instead of from the command line.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from shaketable.io.config_model import ConfigModel

PLAN_IN: dict[str, tuple[str, ...]] = {"both": ("rollout", "train"), "rollout": ("rollout",), "loss": ("train",)}
"""Where the plan acts in training, and the phases that means."""


class RunConfig(ConfigModel):
    """What runs of `train` and of `harden` have in common."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str
    """nano, smollm2-135m, a folder with safetensors, or a hub id."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the problems, their order, the sampling and all noise."""
    warm_start: int = Field(default=0, ge=0, le=100_000)
    """Supervised steps on the task's answers before GRPO, cached and shared by all arms and seeds; 0 turns them off."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    lora: int = Field(default=0, ge=0, le=1024)
    """Train LoRA adapters of this rank; 0 trains all weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)

    eval_seed: int = Field(default=0, ge=0)
    """Seed that draws the test problems, and of the noise they are scored under."""
    eval_plans: tuple[str, ...] = ()
    """Also score under this plan; can be repeated."""
    eval_batch: int = Field(default=0, ge=0)
    """Problems at a time; what fits when 0. Noise is keyed by the call, so a study fixes it."""
    eval_loss: bool = False
    """Read the loss of the right answers too, under every condition."""
    conditions: dict[str, str] | None = None
    """Plans to be scored under, by name, in place of the plan and `eval_plans`; their noise depends on the run's seed too."""
    mechanism: bool = False
    """Read gradient norms and activations per layer, under every condition, at the beginning and at the end."""
    device: str = "cpu"
    """cpu, cuda, npu, xpu or mps; by default this machine's accelerator, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic in float32, or bfloat16 (the default on an accelerator); weights and optimizer are always float32."""

    @model_validator(mode="after")
    def _warm_start_fits(self) -> Self:
        if self.warm_start and self.lora:
            raise ValueError("a warm start trains all weights, and lora freezes them; drop one of the two")
        return self


class TrainConfig(RunConfig):
    """One training run."""

    task: str
    """arithmetic, gsm8k, a .jsonl or .parquet file, or my_tasks.py:Class (its code is run); options follow after commas:
    arithmetic,level=2."""
    steps: int = Field(ge=1, le=10_000_000)
    """Optimizer steps."""
    plan: str | None = None
    """The faults: one line of the plan language, or a YAML file."""
    plan_seed: int | None = None
    """The plan's own seed; the run's when None."""
    plan_in: Literal["both", "rollout", "loss"] = "both"
    """Where the plan acts in training: both, rollout or loss."""
    aqn: str | None = None
    """Noise in the sampler, e.g. global_decay:0.05-0.0005,stages=10, or a file of shaketable guide."""
    tis: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: cap on the ratio of trainer to sampler probability, e.g. 2; off by default."""

    prompts: int = Field(default=16, ge=1)
    """Problems per step."""
    samples: int = Field(default=8, ge=2)
    """Answers per problem, the group of GRPO."""
    micro_batch: int = Field(default=0, ge=0)
    """Answers per forward and backward pass; 0 takes a whole step at once."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; by default 1e-4 below ten million parameters, 2e-5 above (2e-4 with LoRA)."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the initial policy."""
    loss: str = "dapo"
    """TRL's loss_type."""
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up; the rate is constant afterwards."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between scores; the first and the last step are always scored, and only those with 0."""
    eval_n: int = Field(default=200, ge=1)
    """Test problems, drawn at random."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 means a tenth of the run."""
    report_to: tuple[str, ...] = ("tensorboard",)

    @model_validator(mode="before")
    @classmethod
    def _without_decoding(cls, fields: Any) -> Any:
        """Records of older runs name how rollouts were decoded; one way is left."""
        return {k: v for k, v in fields.items() if k != "decoding"} if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        total = self.prompts * self.samples
        if self.micro_batch and total % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide the {total} answers of a step")
        if self.plan is None and self.plan_in != "both":
            raise ValueError(f"plan_in={self.plan_in} needs a plan")
        if self.conditions is not None and self.eval_plans:
            raise ValueError("conditions replace eval_plans; give one or the other")
        if self.warmup >= self.steps and self.warmup:
            raise ValueError(f"a warm-up of {self.warmup} steps leaves nothing of a run of {self.steps}")
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

"""What `shaketable sweep` is asked to do. Imports no torch.

A sweep is models × plans × magnitudes × noise seeds on one sample of problems. Clauses that name no magnitude take each
of the swept ones; 0 is the clean model, without any clause, and is always measured, because every difference is one to it. A
plan with nothing to fill in (a format, or magnitudes in every clause) is one point of its own, whose magnitude is None.

Seeds key the noise and, where only some channels are faulty, which ones. A plan without either gives the same bits under
every seed, so it is run with one: three equal runs would look like evidence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from shaketable.errors import PlanError, ShaketableError
from shaketable.io.config_model import ConfigModel
from shaketable.plan import Plan


@dataclass(frozen=True)
class Setting:
    """One run of one model over all problems."""

    magnitude: float | None
    """0 is clean; None is a plan with nothing to fill in."""
    plan_index: int
    """Which of the sweep's plans it belongs to."""
    name: str
    """`clean`, `plan` or the magnitude; the plan itself where there are several."""
    seed: int
    plan: Plan | None
    """None is clean."""
    is_first: bool
    """Whether this is the first seed of its point."""


class SweepConfig(ConfigModel):
    """One sweep, resolved: what its record begins with and a resumed sweep reads."""

    models: tuple[str, ...] = Field(min_length=1)
    """Folders, Hugging Face ids, nano or smollm2-135m."""
    task: str
    """gsm8k, arithmetic,level=3, text, or a file of your own problems."""
    plan: tuple[str, ...] = Field(min_length=1)
    """The faults: a line or a YAML file. A clause without a magnitude takes each of --magnitudes. Repeat it to compare
    several plans."""
    magnitudes: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = None
    """A list such as 0,0.05,0.1. 0 is the clean model, which is always measured."""
    n: int = Field(ge=1)
    """How many problems, the same for every point; 200, or all texts, by default."""
    seeds: int = Field(default=3, ge=1, le=1000)
    """Noise seeds of every faulty point."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Draws the problems, and is the first noise seed."""
    batch_size: int | None = Field(default=None, ge=1)
    """Problems at a time; by default as many as fit into memory, found once per model and recorded."""
    device: str = "cpu"
    """cpu, cuda, npu, xpu or mps; by default this machine's accelerator, else cpu."""
    dtype: str | None = None
    """float32, bfloat16 or float16; the checkpoint's own by default."""
    engine: Literal["hf", "vllm"] = "hf"
    """hf, or vllm where vLLM is installed."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's LLM as JSON, e.g. '{"tensor_parallel_size": 2}'."""

    @field_validator("models", "plan")
    @classmethod
    def _each_once(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(given))

    @field_validator("plan", mode="before")
    @classmethod
    def _are_plans(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given

    @field_serializer("plan")
    def _plan_alone(self, plan: tuple[str, ...]) -> str | list[str]:
        """One plan as the line that it is, as in records of sweeps that had no other."""
        return plan[0] if len(plan) == 1 else list(plan)

    @field_validator("engine_args", mode="before")
    @classmethod
    def _from_json(cls, given: object) -> object:
        return json.loads(given) if isinstance(given, str) else given

    @field_validator("magnitudes")
    @classmethod
    def _sorted(cls, magnitudes: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if magnitudes is None else tuple(sorted({m + 0.0 for m in magnitudes}))

    @model_validator(mode="after")
    def _fit_together(self) -> SweepConfig:
        resolve_plans(self.plan, self.magnitudes)
        if self.engine_args and self.engine == "hf":
            raise ValueError("engine_args are for engine vllm")
        plans = [s.plan for s in self.settings() if s.plan is not None]
        if self.engine == "vllm" and not plans:
            raise ValueError("engine vllm needs a magnitude above 0: its workers start with a faulty plan")
        for plan in plans:
            if clause := next((c for c in plan.clauses if "forward" not in c.site.directions), None):
                raise PlanError(f"{clause.text()} acts backward only, and a sweep runs no backward pass")
        return self

    def settings(self) -> list[Setting]:
        """Every run of a model, clean first."""
        found = [Setting(0.0, 0, "clean", self.seed, None, True)]
        for index, source in enumerate(self.plan):
            magnitudes = [None] if _closed(source) is not None else [m for m in self.magnitudes or () if m > 0]
            for magnitude in magnitudes:
                plan = Plan.parse(source, seed=self.seed, magnitude=magnitude)
                alone = "plan" if magnitude is None else f"{magnitude:g}"
                name = alone if len(self.plan) == 1 else plan.text()
                for seed in range(self.seed, self.seed + (self.seeds if depends_on_seed(plan) else 1)):
                    seeded = plan.model_copy(update={"seed": seed})
                    found.append(Setting(magnitude, index, name, seed, seeded, seed == self.seed))
        return found


def depends_on_seed(plan: Plan) -> bool:
    """Whether another seed gives other numbers: a random fault, or one on channels that the seed chooses."""
    return any(not c.fault.is_steady or c.fault.sparsity < 1 for c in plan.clauses)


def parse_magnitudes(text: str) -> tuple[float, ...]:
    """`0,0.05,0.1` to numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ShaketableError(f"--magnitudes {text!r} is not a list of numbers such as 0,0.05,0.1") from None


def resolve_plans(sources: Sequence[str], magnitudes: tuple[float, ...] | None) -> tuple[str, ...]:
    """The plans, each in one line, when they and the magnitudes fit together.

    Args:
        sources: Each a line of the plan language, or the path of a YAML file.
        magnitudes: For clauses without one; None when none were given.
    """
    closed = {source: _closed(source) for source in sources}
    if magnitudes is not None and None not in closed.values():
        what = "no clause of the plan is left to take --magnitudes: drop them, or drop the magnitude of a clause"
        raise ShaketableError(f"{what}, e.g. relative_gaussian@op.matmul")
    if magnitudes is None and (source := next((s for s, plan in closed.items() if plan is None), None)) is not None:
        raise ShaketableError(f"the plan {source} leaves a magnitude open: write it, or give e.g. --magnitudes 0,0.05,0.1")
    return tuple(source.strip() if plan is None else plan.text() for source, plan in closed.items())


def _closed(source: str) -> Plan | None:
    """The plan when nothing is left to fill in, None when something is; raises what is wrong with it otherwise."""
    try:
        return Plan.load(source)
    except PlanError as error:
        try:
            Plan.parse(source, magnitude=1.0)
        except PlanError:
            raise error from None
        return None

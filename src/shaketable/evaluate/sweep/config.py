"""What `shaketable sweep` is asked to do. Imports no torch.

A sweep is models × magnitudes × noise seeds on one sample of problems. Clauses of the plan that name no magnitude take each of
the swept ones; 0 is the clean model, without any clause, and is always measured, because every difference is one to it. A plan
with nothing to fill in (a format, or magnitudes in every clause) is one point of its own, whose magnitude is None.

Seeds key the noise and, where only some channels are faulty, which ones. A plan without either gives the same bits under
every seed, so it is run with one: three equal runs would look like evidence.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shaketable.errors import PlanError, ShaketableError
from shaketable.io.config_model import ConfigModel
from shaketable.plan import Plan


@dataclass(frozen=True)
class Setting:
    """One run of one model over all problems."""

    magnitude: float | None
    """0 is clean; None is a plan with nothing to fill in."""
    seed: int
    plan: Plan | None
    """None is clean."""
    is_first: bool
    """Whether this is the first seed of its point."""

    @property
    def name(self) -> str:
        """`clean`, `plan` or the magnitude."""
        return magnitude_name(self.magnitude)


def magnitude_name(magnitude: float | None) -> str:
    """How a point is called: `clean`, `plan` or the magnitude."""
    return "plan" if magnitude is None else "clean" if magnitude == 0 else f"{magnitude:g}"


class SweepConfig(ConfigModel):
    """One sweep, resolved: what its record begins with and a resumed sweep goes on with."""

    models: tuple[str, ...] = Field(min_length=1)
    """Folders, Hugging Face ids, nano or smollm2-135m."""
    task: str
    """gsm8k, arithmetic,level=3, text, or a file of your own problems."""
    plan: str
    """The faults: a line or a YAML file. A clause without a magnitude takes each of --magnitudes."""
    magnitudes: tuple[float, ...] | None = None
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

    @field_validator("models")
    @classmethod
    def _differ(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((m for m in models if models.count(m) > 1), None):
            raise ValueError(f"{twice} is named twice")
        return models

    @field_validator("engine_args", mode="before")
    @classmethod
    def _is_json(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        try:
            found = json.loads(given)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f'{given!r} is no JSON object such as {{"tensor_parallel_size": 2}}')
        return found

    @field_validator("magnitudes")
    @classmethod
    def _is_a_scale(cls, magnitudes: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if magnitudes is None:
            return None
        if bad := [m for m in magnitudes if not (math.isfinite(m) and m >= 0)]:
            raise ValueError(f"{bad[0]:g} is no magnitude; give numbers of 0 or more")
        if twice := [m for m in magnitudes if magnitudes.count(m) > 1]:
            raise ValueError(f"{twice[0]:g} is given twice")
        return tuple(sorted(m + 0.0 for m in magnitudes))

    @model_validator(mode="after")
    def _fit_together(self) -> SweepConfig:
        resolve_plan(self.plan, self.magnitudes)
        if self.engine_args and self.engine == "hf":
            raise ValueError("engine_args are for engine vllm")
        if taken := {"enforce_eager", "additional_config", "worker_extension_cls"} & self.engine_args.keys():
            raise ValueError(f"engine_args: {min(taken)} is set by the sweep itself")
        plans = [s.plan for s in self.settings() if s.plan is not None]
        if self.engine == "vllm" and not plans:
            raise ValueError("engine vllm needs a magnitude above 0: its workers start with a faulty plan")
        for plan in plans[:1]:
            if clause := next((c for c in plan.clauses if "forward" not in c.site.directions), None):
                raise PlanError(f"{clause.text()} acts backward only, and a sweep runs no backward pass")
        return self

    def settings(self) -> list[Setting]:
        """Every run of a model, clean first."""
        found = [Setting(0.0, self.seed, None, True)]
        for magnitude in self.faulty_magnitudes:
            found += [Setting(magnitude, s, self.plan_at(magnitude, s), s == self.seed) for s in self.seeds_at(magnitude)]
        return found

    @property
    def faulty_magnitudes(self) -> list[float | None]:
        """All but clean."""
        return [None] if self.magnitudes is None else [m for m in self.magnitudes if m > 0]

    def plan_at(self, magnitude: float | None, seed: int) -> Plan:
        """The plan of one point."""
        return Plan.parse(self.plan, seed=seed, magnitude=magnitude)

    def seeds_at(self, magnitude: float | None) -> range:
        """The noise seeds of one point: a single one where no seed makes a difference."""
        many = magnitude != 0 and depends_on_seed(self.plan_at(magnitude, self.seed))
        return range(self.seed, self.seed + (self.seeds if many else 1))


def depends_on_seed(plan: Plan) -> bool:
    """Whether another seed gives other numbers: a random fault, or one on channels that the seed chooses."""
    return any(not c.fault.is_steady or c.fault.sparsity < 1 for c in plan.clauses)


def parse_magnitudes(text: str) -> tuple[float, ...]:
    """`0,0.05,0.1` to numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ShaketableError(f"--magnitudes {text!r} is not a list of numbers such as 0,0.05,0.1") from None


def resolve_plan(source: str, magnitudes: tuple[float, ...] | None) -> str:
    """The plan in one line, when it and the magnitudes fit together.

    Args:
        source: A line of the plan language, or the path of a YAML file.
        magnitudes: For clauses without one; None when none were given.
    """
    closed = _closed(source)
    if closed is not None and magnitudes is not None:
        what = "no clause of the plan is left to take --magnitudes: drop them, or drop the magnitude of a clause"
        raise ShaketableError(f"{what}, e.g. relative_gaussian@op.matmul")
    if closed is None and magnitudes is None:
        raise ShaketableError(f"the plan {source} leaves a magnitude open: write it, or give e.g. --magnitudes 0,0.05,0.1")
    return source.strip() if closed is None else closed.text()


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

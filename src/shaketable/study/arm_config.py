"""An arm of a study as its file says it: what is done with the model before it is scored.

An arm that is not trained may have a plan, AQN or both: they are on while it is scored, under a condition called `own`, which
every untrained arm of the study then has; one without a plan is as it comes there. Under all other conditions it is scored like
everybody else. Rejected: an arm's own conditions, by any name. Then two arms would have scores that look comparable and
are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shaketable.aqn.spec import AQN
from shaketable.plan import Plan


class StudyPart(BaseModel):
    """A part of a study's file: unknown keys and numbers without an end are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Guide(StudyPart):
    """AQN made from a diagnosis of the arm's own plan, as `shaketable guide` makes it."""

    guide: Literal["fault", "healthy", "all"]
    """Noise at the located layer, at all but it, or at all layers with σ by their statistics."""
    sigma: float = Field(default=0.05, gt=0)
    schedule: Literal["epoch_aware", "global_decay", "linear_decay"] = "epoch_aware"
    form: Literal["weight", "output"] = "weight"
    unit: Literal["relative", "absolute"] = "relative"
    where: Literal["rollout", "both"] = "rollout"
    order: Literal["before", "after"] = "after"
    """Of the noise, and of a fault on the same output of a layer."""


class Arm(StudyPart):
    """One recipe."""

    description: str = ""
    train: bool = True
    """Or only scored, as the model comes."""
    harden: dict[str, Any] | None = None
    """Options of `shaketable harden`: the arm is repaired instead of trained; `rungs: []` repairs nothing."""
    skip_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Decoder layers that are not run, nor the faults in them: the layer-pruning baseline, for arms that are not trained."""
    elsewhere: bool = False
    """Its runs are made by others and brought in by `shaketable study add`; plan and AQN are what they must have had."""
    after: str | None = None
    """Train the model that this arm has hardened, with the same seed."""
    plan: str | None = None
    """The faults in training: a plan, its YAML file, or the name of a condition; of an untrained arm, those of `own`."""
    plan_in: Literal["both", "rollout", "loss"] = "both"
    aqn: str | Guide | None = None
    """A line, the path of a YAML file, or a guide."""
    model: str | None = None
    """In place of the study's."""
    task: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Options of training that differ from the study's."""

    @field_validator("plan")
    @classmethod
    def _a_file_is_read(cls, plan: str | None) -> str | None:
        return plan if plan is None or not plan.strip().endswith((".yaml", ".yml")) else plan_line(plan)

    @field_validator("aqn", mode="before")
    @classmethod
    def _aqn_is_read(cls, aqn: object) -> object:
        return AQN.load(aqn).text() if isinstance(aqn, str) else Guide.model_validate(aqn) if isinstance(aqn, Mapping) else aqn

    @property
    def kind(self) -> Literal["train", "harden", "evaluate", "added"]:
        """What is done with the model."""
        if self.elsewhere:
            return "added"
        return "harden" if self.harden is not None else "train" if self.train else "evaluate"

    @model_validator(mode="after")
    def _does_something(self) -> Arm:
        if self.skip_layers and (self.kind != "evaluate" or self.plan is not None or self.aqn is not None):
            raise ValueError("skip_layers is for an arm with train: false, and without a plan and AQN")
        if self.elsewhere:
            self._check_elsewhere()
        elif not self.train:
            self._check_untrained()
        if self.harden is not None and (used := [n for n in ("aqn", "overrides", "after") if getattr(self, n)]):
            raise ValueError(
                f"an arm is hardened or trained: {used[0]} is of training; options of harden are written in harden"
            )
        if self.plan is None and self.plan_in != "both":
            raise ValueError(f"plan_in: {self.plan_in} needs a plan")
        if isinstance(self.aqn, Guide) and self.after is not None:
            raise ValueError("a guide diagnoses the study's model, and after names another one; drop one of the two")
        if isinstance(self.aqn, Guide) and self.plan is None:
            raise ValueError("a guide needs a plan: the diagnosis is of the arm's own faults")
        return self

    def _check_elsewhere(self) -> None:
        ours = {"train": not self.train, "harden": self.harden is not None, "after": self.after, "overrides": self.overrides}
        if used := [name for name, given in ours.items() if given]:
            raise ValueError(f"elsewhere: its runs are made by others, so {used[0]} would do nothing")
        if isinstance(self.aqn, Guide):
            raise ValueError(
                "elsewhere: its runs are made by others, and nothing is diagnosed for them; write the AQN they had"
            )

    def _check_untrained(self) -> None:
        if self.overrides or self.plan_in != "both":
            raise ValueError(f"train is false, so {'overrides' if self.overrides else 'plan_in'} would do nothing")
        if isinstance(self.aqn, Guide) and "schedule" in self.aqn.model_fields_set:
            raise ValueError("train is false: a score has no steps for a schedule, and a guide has σ as it is; drop schedule")
        aqn = AQN.load(self.aqn) if isinstance(self.aqn, str) else None
        if aqn is not None and not aqn.is_steady:
            raise ValueError(f"train is false: a score has no steps for {aqn.text()}; write e.g. constant:0.01,form=output")
        if (aqn or self.aqn) is not None and (aqn or self.aqn).form != "output":  # type: ignore[union-attr]
            raise ValueError("train is false: noise on weights is drawn once a rollout, and a score has none; use form=output")

    @property
    def has_own(self) -> bool:
        """Whether it is not trained and has something on while it is scored."""
        return self.kind == "evaluate" and (self.plan is not None or self.aqn is not None)


def plan_line(plan: str) -> str:
    """A plan, or the plan of a file, in one line: what a study holds must not change when a file does."""
    found = Plan.load(plan)
    if found.seed:
        raise ValueError(f"{plan} has a seed of its own, {found.seed}, which a study would not use: its seeds key all noise")
    return found.text()

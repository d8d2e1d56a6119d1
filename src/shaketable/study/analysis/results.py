"""What a study found, as data: computed by `findings`, then shown in the terminal, as Markdown and HTML, and written as JSON.

A number that is not known is None and is shown as a dash: it must not look like 0. Scores, differences and intervals are
fractions; `unit` says how they are read.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

SCHEMA = "shaketable.study/1"
_UNSEEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff"
    "\\U000e0000-\\U000e007f]"
)
"""Controls but tab and line break, marks of writing direction, lone surrogates, and tags, which spell invisible text."""


class PartResult(BaseModel):
    """A part of the findings."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null", coerce_numbers_to_str=True)


class SeedValue(PartResult):
    seed: int
    value: float | None = None


class ArmScore(PartResult):
    """An endpoint of an arm under a condition: mean over seeds with its 95 % interval."""

    condition: str
    endpoint: str = "accuracy"
    unit: str = ""
    mean: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    method: str = ""
    n: int | None = None
    per_seed: tuple[SeedValue, ...] = ()
    first: float | None = None
    """Before training."""


class CurvePoint(PartResult):
    """Mean, least and greatest over the seeds at a step."""

    step: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


class Curve(PartResult):
    name: str
    points: tuple[CurvePoint, ...] = ()
    roughness: float | None = None
    """Mean distance of a point from the straight line between its neighbours, by run, averaged over runs."""


class Proof(PartResult):
    """What a ledger measured of a fault at a place, beside what was asked."""

    where: str
    fault: str = ""
    site: str = ""
    asked: float | None = None
    measured: float | None = None
    error: float | None = None
    changed: float | None = None
    survival: float | None = None
    forward: int | None = None
    backward: int | None = None
    verdict: str = ""
    """agrees, differs, proven (no magnitude to compare) or inert."""
    remark: str | None = None


class LayerResult(PartResult):
    """Inside of a layer, mean over seeds."""

    layer: int
    rms: float | None = None
    kurtosis: float | None = None
    zeros: float | None = None
    survival: float | None = None
    survival_inside: float | None = None
    grad_norm: float | None = None


class MechanismResult(PartResult):
    condition: str
    loss: float | None = None
    layers: tuple[LayerResult, ...] = ()


class Cost(PartResult):
    """Seconds per step, and the shares of a step."""

    seconds_per_step: float | None = None
    sampling_share: float | None = None
    injection_share: float | None = None
    aqn_share: float | None = None
    evaluation_seconds: float | None = None

    @property
    def is_known(self) -> bool:
        return any(value is not None for _, value in self)


class Sample(PartResult):
    condition: str
    id: str = ""
    question: str = ""
    answer: str = ""
    text: str = ""
    correct: bool | float | None = None


class ArmResult(PartResult):
    name: str
    description: str = ""
    kind: str = ""
    model: str = ""
    task: str = ""
    plan: str | None = None
    plan_in: str | None = None
    aqn: str | None = None
    guided: str | None = None
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    scores: tuple[ArmScore, ...] = ()
    curves: tuple[Curve, ...] = ()
    proof: tuple[Proof, ...] = ()
    mechanism: tuple[MechanismResult, ...] = ()
    cost: Cost = Cost()
    samples: tuple[Sample, ...] = ()


class ComparisonResult(PartResult):
    a: str
    b: str
    condition: str | None = None
    endpoint: str = "accuracy"
    unit: str = ""
    scale: float = 1
    difference: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None
    seeds: int | None = None
    problems: int | None = None
    per_seed: tuple[SeedValue, ...] = ()
    primary: bool = False
    verdict: Literal["shown", "not shown", "nothing"] = "nothing"
    method: str | None = ""
    sentence: str = ""


class StepDifference(PartResult):
    """A difference between two arms at one step; its interval is of this step alone."""

    step: int
    difference: float
    ci_low: float | None = None
    ci_high: float | None = None
    seeds: int


class StepComparison(PartResult):
    a: str
    b: str
    curve: str
    unit: str = ""
    scale: float = 1
    points: tuple[StepDifference, ...] = ()


class Ends(PartResult):
    """An interval by its ends; an end that is infinite is None in JSON."""

    low: float | None = None
    high: float | None = None


class RecoveredResult(PartResult):
    """The share of a fault's cost that was recovered in an arm."""

    arm: str
    condition: str
    share: float | None = None
    interval: Ends = Ends()
    taken: float | None = None
    returned: float | None = None
    before: float | None = None
    after: float | None = None
    clean: float | None = None
    clean_after: float | None = None
    seeds: int | None = None
    problems: int | None = None
    sentence: str = ""


class LayerStatistics(PartResult):
    layer: int
    statistics: dict[str, Any] = {}


class DiagnosisResult(PartResult):
    plan: str | None = None
    model: str = ""
    verdict: str = "INCONCLUSIVE"
    sentence: str = ""
    layer: int | None = None
    layers: tuple[LayerStatistics, ...] = ()
    folder: str = ""


class RunFacts(PartResult):
    name: str
    kind: str = ""
    study: str | None = None
    arm: str | None = ""
    seed: int | None = None
    key: str | None = None
    status: str = "missing"
    id: str | None = ""
    sha: str | None = ""
    folder: str = ""
    started: str | None = None
    updated: float | None = None
    step: int | None = None
    steps: int | None = None
    attempts: int | None = None
    resumed: int | None = None
    seconds: float | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


class StudyVerdict(PartResult):
    kind: Literal["shown", "not shown", "nothing"] = "nothing"
    headline: str = ""
    sentence: str = ""


class ConditionFacts(PartResult):
    name: str
    plan: str | None = None
    magnitude: float | None = None
    """Where conditions differ in nothing else."""


class Environment(PartResult):
    """Machine and versions, and how many runs were done with them."""

    runs: int | None = None
    facts: dict[str, Any] = {}


class StudyFacts(PartResult):
    name: str = ""
    question: str = ""
    origin: str = ""
    model: str = ""
    task: str = ""
    seeds: tuple[int, ...] = ()
    steps: int | None = None
    options: str = ""
    n: int | None = None
    conditions: tuple[ConditionFacts, ...] = ()
    engine: str = ""
    command: str = ""
    key: str = ""
    named_before: bool = False
    digest: str = ""


class Findings(PartResult):
    study: StudyFacts = StudyFacts()
    complete: bool = False
    runs: tuple[RunFacts, ...] = ()
    verdict: StudyVerdict = StudyVerdict()
    arms: tuple[ArmResult, ...] = ()
    comparisons: tuple[ComparisonResult, ...] = ()
    at_steps: tuple[StepComparison, ...] = ()
    recovered: tuple[RecoveredResult, ...] = ()
    diagnoses: tuple[DiagnosisResult, ...] = ()
    environments: tuple[Environment, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def primary(self) -> ComparisonResult | None:
        return next((c for c in self.comparisons if c.primary), None)

    def to_json(self) -> str:
        """As JSON; a number that is not finite is null."""
        body = self.model_dump_json(indent=1)
        return f'{{\n "schema": "{SCHEMA}",{body[1:]}\n'

    def visible(self) -> Self:
        """The same with every character that acts without being seen replaced by its code: ⟨U+202E⟩."""
        return type(self).model_validate(_visible(self.model_dump()))


def visible(text: str) -> str:
    """The text with the code of every character that a reader cannot see but a screen obeys; line breaks and tabs stay."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def _visible(value: Any) -> Any:
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(item) for item in value]
    return visible(value) if isinstance(value, str) else value

"""A study as its file says it: arms × seeds, the conditions they are scored under, and the comparison that decides.

    study: guided-aqn
    question: Does noise at the located layer help more than noise everywhere?
    model: nano
    task: arithmetic
    seeds: 5
    train: {steps: 40}                                   # any option of `shaketable train`
    evaluate:
      n: 300
      conditions: {faulty: "dead_zone:0.05,scope=token@layer.3"}
    arms:
      dead zone: {plan: faulty}                          # the plan of a condition, by its name
      global: {plan: faulty, aqn: "epoch_aware:0.05-0.01+0.01-0.0005"}
      targeted: {plan: faulty, aqn: {guide: fault}}      # from a diagnosis of this arm's own plan
    compare:
      primary: {a: targeted, b: global, condition: faulty}
      against: dead zone                                 # every other arm against this one, under every condition

Imports no torch. One seed, or none, is allowed; the report then concludes nothing.

An arm that is not trained may have a plan, AQN or both: they are on while it is scored, under a condition called `own`, which
every untrained arm of the study then has. Under all other conditions it is scored like every other arm. Arms have no conditions
of their own: their scores would look comparable without being so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shaketable.aqn.spec import AQN
from shaketable.errors import nearest
from shaketable.harden.config import HardenConfig
from shaketable.plan import Plan
from shaketable.train.config import TrainConfig

PER_PROBLEM = ("accuracy", "formatted", "loss")
"""Endpoints with a score for every problem, under a condition."""
PER_RUN = ("reward", "seconds_per_step", "aqn_share")
"""Endpoints with one number for every training run."""
CLEAN = "clean"
OWN = "own"
"""The condition under which an untrained arm has its own plan and noise on."""
Name = Annotated[str, Field(pattern=r"^[^.\s]([^.\n]*[^.\s])?$", max_length=60)]
"""Of an arm or a condition, without the dots that separate keys in `--set`."""
OPTIONS = tuple(
    name
    for name in TrainConfig.model_fields
    if name not in ("model", "task", "seed", "plan", "plan_seed", "plan_in", "aqn", "device", "dtype", "report_to")
    and not name.startswith(("eval_", "conditions", "mechanism"))
)
"""What `train` and an arm's `overrides` may set."""
HARDEN_OPTIONS = tuple(
    name
    for name in HardenConfig.model_fields
    if name not in ("model", "task", "prompts", "seed", "plans", "device", "dtype", "conditions", "mechanism")
    and not name.startswith("eval_")
)
"""What `harden`, the study's or an arm's, may set."""


class StudyPart(BaseModel):
    """A part of a study's file: unknown keys and numbers without an end are refused; a key that is null is not there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        for key, value in data.items():
            if key not in cls.model_fields and value is not None:
                raise ValueError(f"unknown key {key!r}; {nearest(str(key), cls.model_fields, shown=20)}")
        return {key: value for key, value in data.items() if key in cls.model_fields}


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
    description: str = ""
    train: bool = True
    """Or only scored, as the model comes."""
    harden: dict[str, Any] | None = None
    """Options of `shaketable harden`: the arm is repaired instead of trained; `rungs: []` repairs nothing."""
    skip_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Decoder layers that are not run, nor the faults in them: the layer-pruning baseline, for arms that are not trained."""
    elsewhere: bool = False
    """Its runs are made by others and brought in by `shaketable study add`; plan and AQN are what they must have had."""
    plan: str | None = None
    """The faults in training: a plan, its YAML file, or the name of a condition; of an untrained arm, those of `own`."""
    plan_in: Literal["both", "rollout", "loss"] = "both"
    aqn: str | Guide | None = None
    """A line, a file of `shaketable guide`, or a guide."""
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
        if self.elsewhere:
            return "added"
        return "harden" if self.harden is not None else "train" if self.train else "evaluate"

    @model_validator(mode="after")
    def _fits_together(self) -> Arm:
        if self.skip_layers and (self.kind != "evaluate" or self.plan is not None or self.aqn is not None):
            raise ValueError("skip_layers is for an arm with train: false, and without a plan and AQN")
        if self.harden is not None and (used := [n for n in ("aqn", "overrides") if getattr(self, n)]):
            raise ValueError(f"an arm is hardened or trained: {used[0]} is of training; write the options of harden in harden")
        if isinstance(self.aqn, Guide) and (self.plan is None or self.elsewhere):
            raise ValueError("a guide needs a plan, which is diagnosed on the study's model, and no elsewhere")
        if self.kind == "evaluate" and self.aqn is not None:
            aqn = AQN.load(self.aqn) if isinstance(self.aqn, str) else self.aqn
            if isinstance(aqn, AQN) and not aqn.is_steady:
                raise ValueError(f"train is false: a score has no steps for {aqn.text()}; write e.g. constant:0.01,form=output")
            if aqn.form != "output":
                raise ValueError(
                    "train is false: noise on weights is drawn once a rollout, and a score has none; use form=output"
                )
        return self

    @property
    def has_own(self) -> bool:
        """Whether it is not trained and has something on while it is scored."""
        return self.kind == "evaluate" and (self.plan is not None or self.aqn is not None)


class Evaluate(StudyPart):
    """How every arm is scored."""

    n: int = Field(default=200, ge=1)
    """Test problems, the same for all."""
    seed: int = Field(default=0, ge=0)
    """Draws the problems; with a run's seed it keys the noise they are scored under."""
    every: int = Field(default=0, ge=0)
    """Steps between scores; the first and the last step always."""
    batch: int = Field(default=128, ge=1)
    """Problems at a time. Fixed, because noise is keyed by the call: the same in every run and on every machine."""
    conditions: dict[Name, str] = Field(default_factory=dict)
    """Plans by name; `clean` is always there."""
    loss: bool = False
    """Read the loss of the right answers too, under every condition: the endpoint `loss`."""
    mechanism: bool = True
    """Read gradient norms and activations per layer, before the first step and after the last."""

    @field_validator("conditions")
    @classmethod
    def _plans_are_read(cls, conditions: dict[str, str]) -> dict[str, str]:
        if CLEAN in conditions:
            raise ValueError(f"{CLEAN} is always there, and has no plan")
        if OWN in conditions:
            raise ValueError(f"{OWN} is what untrained arms with a plan or AQN are scored under; choose another name")
        return {name: plan_line(plan) for name, plan in conditions.items()}


class Diagnose(StudyPart):
    """How guided arms are diagnosed; as `shaketable locate`."""

    mode: Literal["device", "host", "all"] = "all"
    tokens: int = Field(default=256, ge=2)
    seed: int = Field(default=0, ge=0)
    conditions: tuple[str, ...] = ()
    """Conditions whose fault is located too, for the report."""


class Comparing(StudyPart):
    """One difference: a − b."""

    a: str
    b: str
    condition: str | None = None
    """For endpoints with a score for every problem."""
    endpoint: Literal["accuracy", "formatted", "loss", "reward", "seconds_per_step", "aqn_share"] = "accuracy"

    @model_validator(mode="after")
    def _is_measurable(self) -> Comparing:
        if (self.condition is None) == (self.endpoint in PER_PROBLEM):
            needs = "needs a condition" if self.condition is None else "is of the training run and has no condition"
            raise ValueError(f"the endpoint {self.endpoint} {needs}")
        return self


class Compare(StudyPart):
    """What is compared. The primary comparison decides; it is named before the run."""

    primary: Comparing | None = None
    secondary: tuple[Comparing, ...] = ()
    against: str | None = None
    """Every other arm against this one, under every condition."""


class Report(StudyPart):
    steps: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Steps at which every arm is compared with the baseline; all that were scored when none is named."""


class Engine(StudyPart):
    """Where runs are done, and what each of them gets."""

    kind: Literal["local", "ray"] = "local"
    workers: int = Field(default=0, ge=0)
    """Runs at a time; as many as fit when 0."""
    threads: int = Field(default=1, ge=1)
    """Cores of each run. Another number of threads adds in another order: it belongs to what a run is."""
    gpus: float | None = Field(default=None, ge=0, le=1)
    """Part of a GPU for each run, 0.25 for four runs on a GPU; none on a CPU and one elsewhere by default."""
    retries: int = Field(default=1, ge=0)
    """How often a run that crashed is tried again."""


class StudyConfig(StudyPart):
    study: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """Its name, and that of its folder in the store."""
    question: str = ""
    origin: str = ""
    """Which question of the origin study it answers."""
    model: str
    task: str
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    train: dict[str, Any] = Field(default_factory=dict)
    """Options of training, for all arms."""
    harden: dict[str, Any] = Field(default_factory=dict)
    """Options of `shaketable harden`, for all arms that are hardened."""
    evaluate: Evaluate = Evaluate()
    diagnose: Diagnose = Diagnose()
    arms: dict[Name, Arm] = Field(min_length=1)
    compare: Compare = Compare()
    report: Report = Report()
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] | None = None
    """float32 on a CPU and bfloat16 elsewhere by default."""
    keep: Literal["weights", "records"] = "weights"
    """Whether the trained weights stay in the store."""
    engine: Engine = Engine()

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_or_list(cls, seeds: object) -> object:
        if isinstance(seeds, list | tuple) and len(set(map(str, seeds))) == len(seeds):
            return seeds
        if isinstance(seeds, bool) or not isinstance(seeds, int) or not 0 <= seeds <= 1000:
            raise ValueError(f"{seeds!r} is neither a number of seeds, 0 to 1000, nor a list of different ones")
        return tuple(range(seeds))

    @model_validator(mode="after")
    def _fits_together(self) -> StudyConfig:
        for name, arm in self.arms.items():
            _check_options(f"arms.{name}.overrides", arm.overrides)
            _check_options(f"arms.{name}.harden", arm.harden or {}, HARDEN_OPTIONS)
        _check_options("train", self.train)
        _check_options("harden", self.harden, HARDEN_OPTIONS)
        for arm in self.arms.values():
            self.plan_of(arm)
        for name in self.diagnose.conditions:
            self._known("diagnose.conditions", "condition", name, self.evaluate.conditions)
        if self.compare.against is not None:
            self._known("compare.against", "arm", self.compare.against, self.arms)
        for asked in self.comparisons:
            self._check_comparison(asked)
        if len(self.arms) > 1 and self.compare.primary is None:
            raise ValueError("compare.primary is missing: name the comparison that decides before the run")
        return self

    def _check_comparison(self, asked: Comparing) -> None:
        for name in (asked.a, asked.b):
            self._known("compare", "arm", name, self.arms)
            if asked.endpoint in PER_RUN and self.arms[name].kind not in ("train", "added"):
                raise ValueError(f"compare: {name} is not trained, and does not measure {asked.endpoint}")
        if asked.condition is not None:
            self._known("compare", "condition", asked.condition, self.conditions)
        if asked.condition == OWN and (trained := [n for n in (asked.a, asked.b) if self.arms[n].kind != "evaluate"]):
            raise ValueError(f"compare: {trained[0]} is not scored under {OWN}, which is for arms with train: false")
        if asked.endpoint == "loss" and not self.evaluate.loss:
            raise ValueError("compare: the endpoint loss is not measured; write evaluate: {loss: true}")
        if asked.endpoint in (*PER_PROBLEM, "reward") and not self.comparable(asked.a, asked.b):
            raise ValueError(f"compare: {asked.a} and {asked.b} are one arm, or solve different tasks")

    @staticmethod
    def _known(where: str, what: str, name: str, names: Iterable[str]) -> None:
        if name not in (valid := list(names)):
            raise ValueError(f"{where}: there is no {what} {name!r}; {nearest(name, valid)}")

    @property
    def conditions(self) -> dict[str, str | None]:
        """Plans by the name of their condition, clean first; under `own` every arm has its own, so there is none to name."""
        return {CLEAN: None, **self.evaluate.conditions, **({OWN: None} if self.has_own else {})}

    @property
    def has_own(self) -> bool:
        """Whether untrained arms are scored under `own`."""
        return any(arm.has_own for arm in self.arms.values())

    def plan_of(self, arm: Arm) -> str | None:
        if arm.plan is None:
            return None
        if "@" not in arm.plan and arm.plan not in self.evaluate.conditions:
            known = nearest(arm.plan, self.evaluate.conditions)
            raise ValueError(f"{arm.plan!r} is neither a plan nor the name of a condition; {known}")
        return self.evaluate.conditions.get(arm.plan) or plan_line(arm.plan)

    @property
    def comparisons(self) -> list[Comparing]:
        """All that is compared, the primary first, each once."""
        asked = [self.compare.primary] if self.compare.primary is not None else []
        asked += self.compare.secondary
        if (base := self.compare.against) is not None:
            for name in (arm for arm in self.arms if self.comparable(arm, base)):
                both = self.arms[name].kind == self.arms[base].kind == "evaluate"
                asked += [Comparing(a=name, b=base, condition=c) for c in self.conditions if c != OWN or both]
        found: dict[tuple[Any, ...], Comparing] = {}
        for one in asked:
            found.setdefault((frozenset((one.a, one.b)), one.condition, one.endpoint), one)
        return list(found.values())

    def comparable(self, a: str, b: str) -> bool:
        """Whether two names are of different arms that solve the same problems."""
        return a != b and (self.arms[a].task or self.task) == (self.arms[b].task or self.task)

    @property
    def resolved_dtype(self) -> Literal["float32", "bfloat16"]:
        """The arithmetic of the runs."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


def _check_options(where: str, options: Mapping[str, Any], known: tuple[str, ...] = OPTIONS) -> None:
    for key in options:
        if key not in known:
            raise ValueError(f"{where}: unknown option {key!r}; {nearest(key, known, shown=20)}")


def plan_line(plan: str) -> str:
    """A plan, or the plan of a file, in one line: what a study holds must not change when a file does."""
    found = Plan.load(plan)
    if found.seed:
        raise ValueError(f"{plan} has a seed of its own, {found.seed}, which a study would not use: its seeds key all noise")
    return found.text()

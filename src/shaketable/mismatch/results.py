"""The results of every stage, as the terminal, the page and the JSON show them. Imports no torch.

JSON holds each field and each property under its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shaketable.io.strict_json import strict

SCHEMA = 5
MEAN, LARGEST = 1.5, 10.0
"""Times what rounding makes, in the mean and of one token: what a difference may be."""


@dataclass(frozen=True)
class Deviation:
    """Differences of log-probabilities, compared with what rounding makes."""

    tokens: int
    mean_abs: float
    largest: float
    """The difference that is largest in units of its token's own scale."""
    mean_ratio: float
    """Mean size over what rounding makes."""
    worst_ratio: float
    """The largest difference in units of its token's own scale."""
    worst: tuple[int, int]
    """Rollout and position of it."""
    positive: tuple[float, float]
    """Share of differences above zero, 99.9 %."""
    biased: bool
    worst_pair: tuple[float, float | None] | None = None
    """The returned number of that token and the expected one; None where the token is impossible."""

    @property
    def too_large(self) -> bool:
        """Whether rounding cannot have made differences of this size."""
        return self.mean_ratio > MEAN or self.worst_ratio > LARGEST

    @property
    def is_doubtful(self) -> bool:
        """Whether rounding that is measured more often might explain them: a few draws may all be small."""
        return self.too_large and self.mean_ratio <= 2 * MEAN

    @property
    def explained(self) -> bool:
        """Whether rounding can have made them."""
        return not self.too_large and not self.biased

    @property
    def says(self) -> str:
        """Why rounding does not explain them; empty where it does."""
        rollout, position = self.worst
        if self.mean_ratio > MEAN:
            return f"they differ by {self.mean_abs:.2g} in the mean, {self.mean_ratio:.3g} times what rounding makes"
        if self.worst_ratio > LARGEST:
            where = f"token {position} of rollout {rollout}"
            return f"{where} differs by {self.largest:.2g}, {self.worst_ratio:.3g} times what rounding makes of it"
        if self.biased:
            low, high = self.positive
            side, share = ("above", low) if low > 0.5 else ("below", 1 - high)
            return f"at least {share:.0%} of the differences are {side} zero, and rounding has no sign"
        return ""


@dataclass(frozen=True)
class Distance:
    """The distance between two sets of log-probabilities of the same tokens."""

    tokens: int
    mean_abs: float
    """Mean |d|: floors and explanations are compared by it, since it is neither squared nor signed."""
    largest: float
    k1: float
    k3: float
    outside: float
    """Share of tokens whose ratio leaves [0.9, 1.1]."""
    impossible: int
    """Tokens to which one side gives no probability at all."""


@dataclass(frozen=True)
class WorstToken:
    """A token with one of the largest gaps."""

    rollout: int
    position: int
    token: int
    text: str | None
    engine: float
    trainer: float | None
    """None where the trainer gives it no probability."""


@dataclass(frozen=True)
class Bucket:
    """Tokens in a range of positions; both ends belong to it."""

    first: int
    last: int
    tokens: int
    mean_abs: float


@dataclass(frozen=True)
class Gap(Distance):
    """Stage 1: the returned log-probabilities against the trainer's."""

    rollouts: int
    k3_interval: tuple[float, float]
    """95 %."""
    interval_over: Literal["rollouts", "tokens"]
    """Tokens where there are few rollouts."""
    worst: list[WorstToken]
    by_position: list[Bucket]
    judged: Deviation


@dataclass(frozen=True)
class RoundingSize:
    """How far rounding alone moves log-probabilities."""

    mean_abs: float
    dtype: str
    draws: int


@dataclass(frozen=True)
class FloorRow:
    """One side in one way of computing, against itself."""

    side: Literal["trainer", "engine"]
    variant: str
    mean_abs: float
    largest: float
    wrong: str
    """Why rounding does not explain it; empty where it does."""
    most: int
    """The rollout that it moves most, in units of rounding."""


@dataclass(frozen=True)
class Floor:
    """Stage 3: each side against itself."""

    rows: list[FloorRow]
    unavailable: list[str]
    """Ways that could not be computed, with the reason."""

    @property
    def largest(self) -> FloorRow:
        """The row with the largest mean."""
        return max(self.rows, key=lambda row: row.mean_abs)


@dataclass(frozen=True)
class HypothesisFit:
    """How well one hypothesis of stage 4 fits."""

    name: str
    says: str
    mean_abs: float | None
    """What it leaves of the gap; None where it calls every token impossible."""
    gain: tuple[float, float] = (0.0, 0.0)
    """Interval of the mean improvement of a token's loss."""
    wins: bool = False
    at_floor: bool = False
    """Whether rounding explains what it leaves."""
    names_the_gap: bool = False
    """Whether it wins and leaves next to nothing."""


@dataclass(frozen=True)
class Semantics:
    """Stage 4: what else the returned numbers may mean."""

    mean_abs: float
    tokens: int
    best: HypothesisFit | None
    rows: list[HypothesisFit]

    @property
    def named(self) -> HypothesisFit | None:
        """The hypothesis that explains the gap."""
        return self.best if self.best is not None and self.best.names_the_gap else None


@dataclass(frozen=True)
class ParameterDifference:
    """A parameter that is not the trainer's."""

    name: str
    kind: str
    """missing, shape, other_parameter, earlier, cast, stale, other_values."""
    says: str


@dataclass(frozen=True)
class Weights:
    """Stage 5: parameters, bit for bit."""

    compared: int
    cast: int
    """Parameters that the engine holds in its own dtype, as was asked for."""
    differing: list[ParameterDifference]
    engine_dtype: str = ""
    missing: list[str] = field(default_factory=list)
    """Parameters that the engine does not give."""
    unknown: list[str] = field(default_factory=list)
    """Parameters of the engine that the trainer does not have."""


@dataclass(frozen=True)
class LayerRouting:
    """Stage 6, one layer: tokens whose experts differ."""

    layer: int
    tokens: int
    experts: tuple[int, int]
    """Experts of each token: the trainer's count and the engine's."""
    differs: float
    weights: float | None
    """Mean distance of the weights of the same experts."""


@dataclass(frozen=True)
class OperatorFault:
    """An operator outside of its rounding interval, or beyond what rounding explains."""

    name: str
    kind: str
    phase: str
    lanes: list[int]
    lanes_of: int
    looks_like: str
    text: str


@dataclass(frozen=True)
class KindCount:
    """Operators of one kind that were judged, their values, and how many of these lie outside of their intervals."""

    operators: int = 0
    values: int = 0
    outside: int = 0


@dataclass(frozen=True)
class OperatorResults:
    """Stage 7: every operator against its rounding interval."""

    rollouts: int
    tokens: int
    kinds: dict[str, KindCount]
    wrong: list[OperatorFault]
    absent: list[str]
    """Operators of the trainer that the engine did not record."""
    layers_absent: list[int]
    """Layers none of whose operators ran."""

    @property
    def count(self) -> int:
        """Operators that were judged."""
        return sum(kind.operators for kind in self.kinds.values())


@dataclass(frozen=True)
class FamilyShare:
    """The KL that one family of operators causes alone, and its share of the sum over all families."""

    family: str
    kl: float
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Shares:
    """Stage 8: the operators' differences, put into the trainer."""

    families: list[FamilyShare]
    """Those with the largest share first."""
    kl: float
    tokens: int
    together: float | None
    """KL of all differences together over the sum of the families' own."""
    explained: float
    """How much of the gap, token by token, all differences together explain."""
    closure: Deviation | None = None
    """The returned numbers against the trainer's with all differences put in."""
    rest_alike: bool = True
    """Whether rollouts whose operators were not recorded have a gap like those which were."""

    @property
    def leaders(self) -> list[str]:
        """The family with the largest share, and those whose intervals overlap its own."""
        return [row.family for row in self.families if row.high >= self.families[0].low]


@dataclass
class ExactOperator:
    """How many of an operator's values are bit-equal between trainer and engine on the same input, in one phase."""

    name: str
    kind: str
    phase: str
    values: int = 0
    equal: int = 0
    ulp: int = 0
    """The largest difference, in units in the last place of the engine's dtype."""
    variant: str = ""
    """The computation of the trainer's that gives the engine's bits; empty where none does."""

    @property
    def share(self) -> float:
        """Of the values, those that are equal."""
        return self.equal / self.values

    @property
    def why(self) -> str:
        """Why the bits differ; empty where they do not."""
        return "" if self.equal == self.values else self.variant or f"unknown: differs by at most {self.ulp} ulp"


@dataclass(frozen=True)
class ExactKind:
    """All operators of one kind in one phase."""

    kind: str
    phase: str
    operators: int
    different: int
    share: float
    why: list[str]


@dataclass
class Exact:
    """The bits of all operators, in the order of computation."""

    rollouts: int
    tokens: int
    operators: list[ExactOperator] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    """Phases that the engine could not record, and why."""

    @property
    def first(self) -> ExactOperator | None:
        """The first operator whose bits differ."""
        return next((row for row in self.operators if row.why), None)

    @property
    def kinds(self) -> list[ExactKind]:
        """By kind and phase; of the reasons that are unknown, that of the largest difference."""
        found = []
        for phase, kind in dict.fromkeys((row.phase, row.kind) for row in self.operators):
            rows = [row for row in self.operators if (row.phase, row.kind) == (phase, kind)]
            different = [row for row in rows if row.why]
            unknown = sorted((row for row in different if not row.variant), key=lambda row: row.ulp)
            why = dict.fromkeys([row.variant for row in different if row.variant] + [row.why for row in unknown[-1:]])
            share = sum(row.equal for row in rows) / sum(row.values for row in rows)
            found.append(ExactKind(kind, phase, len(rows), len(different), share, list(why)))
        return found

    @property
    def says(self) -> str:
        """In one line."""
        many = f"{self.tokens} tokens of {self.rollouts} rollouts"
        if self.first is not None:
            return f"{self.first.name} differs first ({self.first.phase}, {self.first.share:.1%} bit-equal); {many}"
        return f"every operator gives the trainer's bits; {many}" if self.operators else "no operator was recorded"


@dataclass(frozen=True)
class TrainerFacts:
    """The trainer's side, for the report."""

    model: str
    dtype: str
    device: str
    attention: str
    batch: int
    versions: dict[str, str]


@dataclass(frozen=True)
class EngineFacts:
    """The engine's side, for the report."""

    engine: str
    version: str
    dtype: str
    arguments: dict[str, object]
    """What it was started with, and what it reports of itself."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion of all stages."""

    verdict: Literal["LEGAL", "DEFECT", "INCONCLUSIVE"]
    stage: str
    sentence: str
    exit_code: int
    next: str | None
    """The command that would settle an inconclusive verdict; "…" replaces the options that were given."""
    not_looked_at: list[str]


@dataclass(kw_only=True)
class Mismatch:
    """A comparison of sampler and trainer: the results of the stages, as far as they ran, and the verdict."""

    trainer: TrainerFacts
    engine: EngineFacts | None
    """None where there are only recorded log-probabilities."""
    sampling: dict[str, Any]
    gap: Gap
    rounding: RoundingSize
    semantics: Semantics
    floor: Floor
    returned: Deviation | None = None
    own_semantics: Semantics | None = None
    """Hypotheses about the engine's own logits."""
    weights: Weights | None = None
    routing: list[LayerRouting] | None = None
    operators: OperatorResults | None = None
    shares: Shares | None = None
    exact: Exact | None = None
    """Of `--exact`; the verdict does not depend on it."""
    died: str | None = None
    """The error with which the engine ended."""
    unchecked: list[str] = field(default_factory=list)
    """Links that could not be checked: they make the verdict INCONCLUSIVE."""
    caveats: list[str] = field(default_factory=list)
    """What was not looked at without breaking a link."""
    conclusion: Verdict = field(init=False)
    command: str = ""
    """What the page and the JSON were made by, when, and with which version."""
    date: str = ""
    version: str = ""

    @property
    def at_floor(self) -> bool:
        """Whether rounding explains the gap, token by token."""
        return self.gap.judged.explained

    verdict = property(lambda self: self.conclusion.verdict)
    stage = property(lambda self: self.conclusion.stage)
    sentence = property(lambda self: self.conclusion.sentence)
    exit_code = property(lambda self: self.conclusion.exit_code)

    def to_dict(self) -> dict[str, Any]:
        """As `--json` writes it: the verdict and the stages side by side."""
        facts: dict[str, Any] = strict(self)
        return {"schema": SCHEMA, "kind": "mismatch", **facts.pop("conclusion"), **facts}

"""How σ changes over a run: pure functions of the step and the number of steps. Imports no torch.

With T steps in all:

    global_decay   K stages; stage = ⌊step·K/T⌋. Stage 0 is silent; the i-th after it has σ = start·(end/start)^(i/(K−2)),
                   i = 0 … K−2. This is QeRL's schedule (0.05 to 0.0005, K = 10).
    linear_decay   σ = start + (end − start)·step/T: a straight line over the whole run.
    epoch_aware    E epochs of T/E steps, each with its own start and end: σ = start·(end/start)^p, p the part of the epoch
                   that is over. No epoch runs nearly noise-free, as the later ones do under global_decay.
    constant       σ.

Step T and those after it have the σ that the schedule ends with. Steps are counted in integers (step·K against T), so that no
stage begins a step early or late by rounding. A schedule is asked with the real step and the real total, epoch_aware has no
silent stage, and `check` refuses a run in which no step has noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shaketable.errors import ShaketableError, first_problem, nearest

T = TypeVar("T", bound=BaseModel)
Sigma = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Described(BaseModel):
    """Frozen, checked data whose first fields can be given without their names; errors are one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, *values: Any, **fields: Any) -> None:
        names = [name for name in type(self).model_fields if name != "kind"]
        if len(values) > len(names):
            raise TypeError(f"{type(self).__name__} takes at most {len(names)} values, not {len(values)}")
        if unknown := next((name for name in fields if name not in type(self).model_fields), None):
            raise ShaketableError(f"{type(self).__name__} has no {unknown!r}; {nearest(unknown, names, shown=12)}")
        try:
            super().__init__(**dict(zip(names, values, strict=False)), **fields)
        except ValidationError as error:
            raise ShaketableError(f"{type(self).__name__}: {first_problem(error)}") from None


def checked(model: type[T], data: object, name: str) -> T:
    """Validated data, or one line that says where it is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ShaketableError(f"{name}: {first_problem(error)}") from None


class ScheduleBase(Described):
    """What every schedule can say."""

    kind: str
    steady: ClassVar[bool] = False
    """Whether σ is the same at every step."""

    def sigma(self, step: int, total_steps: int) -> float:
        """σ at one of `total_steps` steps."""
        if step < 0 or total_steps < 1:
            raise ShaketableError(f"{self.kind} has no σ at step {step} of {total_steps}")
        return self._at(min(step, total_steps), total_steps)

    def _at(self, step: int, total: int) -> float:
        raise NotImplementedError

    def peak(self) -> float:
        """The largest σ there can be."""
        raise NotImplementedError

    def check(self, total_steps: int) -> None:
        """Raise when no step of a run has noise."""
        if not any(self.sigma(step, total_steps) > 0 for step in range(total_steps)):
            raise ShaketableError(f"{self.text()}: σ is 0 at each of {total_steps} steps; {self._why_silent()}")

    def _why_silent(self) -> str:
        return "give a σ above 0"

    def text(self) -> str:
        """The schedule as `AQN.load` reads it."""
        raise NotImplementedError


class _Decay(ScheduleBase):
    """One decay over the whole run."""

    start: Sigma
    """σ of the first step, or of the first stage that has noise."""
    end: float
    """σ after the last step, or of the last stage."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        _check_falls(self.start, self.end)
        return self

    def peak(self) -> float:
        return self.start

    def text(self) -> str:
        return f"{self.kind}:{number(self.start)}-{number(self.end)}"


class GlobalDecay(_Decay):
    """QeRL's stages over the whole run; the first is silent."""

    kind: Literal["global_decay"] = "global_decay"
    end: Sigma
    """σ of the last stage."""
    stages: int = Field(default=10, ge=3)
    """All stages, the silent one among them."""

    if TYPE_CHECKING:

        def __init__(self, start: float, end: float, stages: int = 10) -> None: ...

    def _at(self, step: int, total: int) -> float:
        stage = min(step * self.stages // total, self.stages - 1)
        return _between(self.start, self.end, (stage - 1) / (self.stages - 2)) if stage else 0.0

    def _why_silent(self) -> str:
        return f"stage 0 of {self.stages} is silent and no other is reached"

    def text(self) -> str:
        return f"{super().text()},stages={self.stages}"


class LinearDecay(_Decay):
    """A straight line from start to end over the whole run."""

    kind: Literal["linear_decay"] = "linear_decay"
    end: float = Field(ge=0, allow_inf_nan=False)
    """σ after the last step; may be 0."""

    if TYPE_CHECKING:

        def __init__(self, start: float, end: float) -> None: ...

    def _at(self, step: int, total: int) -> float:
        return self.end if step == total else self.start + (self.end - self.start) * (step / total)


class EpochAware(ScheduleBase):
    """Each epoch has its own decay."""

    kind: Literal["epoch_aware"] = "epoch_aware"
    epochs: tuple[tuple[Sigma, Sigma], ...] = Field(min_length=1)
    """Start and end of each epoch's σ."""

    if TYPE_CHECKING:

        def __init__(self, epochs: Iterable[tuple[float, float]]) -> None: ...

    @model_validator(mode="after")
    def _falls(self) -> Self:
        for start, end in self.epochs:
            _check_falls(start, end)
        return self

    @classmethod
    def between(cls, start: float, end: float, epochs: int) -> EpochAware:
        """Boundaries in geometric progression: epoch e runs from start·(end/start)^(e/E) to the next one."""
        GlobalDecay(start, end)
        if epochs < 1:
            raise ShaketableError(f"epoch_aware needs at least one epoch, not {epochs}")
        bounds = accumulate((_between(start, end, e / epochs) for e in range(epochs + 1)), min)
        return cls(tuple(pairwise(bounds)))

    def _at(self, step: int, total: int) -> float:
        epoch, over = divmod(step * len(self.epochs), total)
        if epoch == len(self.epochs):
            return self.epochs[-1][1]
        return _between(*self.epochs[epoch], over / total)

    def peak(self) -> float:
        return max(start for start, _ in self.epochs)

    def text(self) -> str:
        return f"{self.kind}:{'+'.join(f'{number(a)}-{number(b)}' for a, b in self.epochs)}"


class Constant(ScheduleBase):
    """The same σ at every step."""

    kind: Literal["constant"] = "constant"
    steady: ClassVar[bool] = True
    value: float = Field(ge=0, allow_inf_nan=False)

    if TYPE_CHECKING:

        def __init__(self, value: float) -> None: ...

    def _at(self, step: int, total: int) -> float:
        return self.value

    def peak(self) -> float:
        return self.value

    def text(self) -> str:
        return f"{self.kind}:{number(self.value)}"


AnySchedule = GlobalDecay | LinearDecay | EpochAware | Constant
Schedule = Annotated[AnySchedule, Field(discriminator="kind")]
SCHEDULES: dict[str, type[AnySchedule]] = {c.model_fields["kind"].default: c for c in get_args(AnySchedule)}

NAMED = ("epoch_aware", "global_decay", "linear_decay")
"""Schedules that a guided file may just name."""


def like_the_origin(kind: str, base: float) -> AnySchedule:
    """The origin's schedules, which it ran at 0.05, from another base σ: a decay by 100 in all."""
    if kind != "epoch_aware":
        return (GlobalDecay if kind == "global_decay" else LinearDecay)(base, base / 100)
    return EpochAware(((base, base / 5), (base / 5, base / 100)))


def _between(start: float, end: float, part: float) -> float:
    """From start (part 0) to end (part 1) in geometric progression; exact at both, and never outside of them."""
    return end if part == 1 else min(start, max(end, start * (end / start) ** part))


def _check_falls(start: float, end: float) -> None:
    if end > start:
        raise ValueError(f"a decay ends at or below its start, and {end:g} is above {start:g}")


def number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return repr(value).removesuffix(".0")

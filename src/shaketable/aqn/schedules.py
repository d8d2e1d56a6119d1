"""How σ changes over a run: pure functions of the step and the number of steps. Imports no torch.

With T steps in all:

    global_decay   K stages; stage = ⌊step·K/T⌋. Stage 0 is silent; the i-th after it has σ = start·(end/start)^(i/(K−2)),
                   i = 0 … K−2. This is QeRL's schedule (0.05 to 0.0005, K = 10).
    linear_decay   σ = start + (end − start)·step/T: a straight line over the whole run.
    epoch_aware    E epochs of T/E steps, each with its own start and end: σ = start·(end/start)^p, p the part of the epoch
                   that is over. No epoch runs nearly noise-free, as the later ones do under global_decay.
    constant       σ.

Step T and those after it have the σ that the schedule ends with. Steps are counted in integers (step·K against T), so that no
stage begins a step early or late by rounding. `check` refuses a run in which no step has noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from shaketable.errors import ShaketableError


@dataclass(frozen=True)
class Schedule:
    """What every schedule can say."""

    kind: ClassVar[str]
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
            raise ShaketableError(f"{self.text()}: σ is 0 at each of {total_steps} steps")

    def text(self) -> str:
        """The schedule as `AQN.load` reads it."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Decay(Schedule):
    """From one σ to another over the whole run."""

    start: float
    end: float

    def peak(self) -> float:
        return self.start

    def text(self) -> str:
        return f"{self.kind}:{number(self.start)}-{number(self.end)}"


@dataclass(frozen=True)
class GlobalDecay(_Decay):
    """QeRL's stages; the first is silent, and `start` is the σ of the second."""

    kind: ClassVar[str] = "global_decay"
    stages: int = 10
    """All stages, the silent one among them."""

    def __post_init__(self) -> None:
        _check_falls(self.start, self.end)
        if self.stages < 3:
            raise ShaketableError(f"global_decay needs 3 stages or more, not {self.stages}")

    def _at(self, step: int, total: int) -> float:
        stage = min(step * self.stages // total, self.stages - 1)
        return _between(self.start, self.end, (stage - 1) / (self.stages - 2)) if stage else 0.0

    def text(self) -> str:
        return f"{super().text()},stages={self.stages}"


@dataclass(frozen=True)
class LinearDecay(_Decay):
    """A straight line; `end` may be 0."""

    kind: ClassVar[str] = "linear_decay"

    def __post_init__(self) -> None:
        _check_falls(self.start, self.end, to_zero=True)

    def _at(self, step: int, total: int) -> float:
        return self.end if step == total else self.start + (self.end - self.start) * (step / total)


@dataclass(frozen=True)
class EpochAware(Schedule):
    """Each epoch has its own decay."""

    kind: ClassVar[str] = "epoch_aware"
    epochs: Sequence[tuple[float, float]]
    """Start and end of each epoch's σ."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", tuple((start, end) for start, end in self.epochs))
        if not self.epochs:
            raise ShaketableError("epoch_aware needs at least one epoch")
        for start, end in self.epochs:
            _check_falls(start, end)

    @classmethod
    def between(cls, start: float, end: float, epochs: int) -> EpochAware:
        """Boundaries in geometric progression: epoch e runs from start·(end/start)^(e/E) to the next one."""
        _check_falls(start, end)
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


@dataclass(frozen=True)
class Constant(Schedule):
    """The same σ at every step."""

    kind: ClassVar[str] = "constant"
    steady: ClassVar[bool] = True
    value: float

    def __post_init__(self) -> None:
        check_size("σ", self.value)

    def _at(self, step: int, total: int) -> float:
        return self.value

    def peak(self) -> float:
        return self.value

    def text(self) -> str:
        return f"{self.kind}:{number(self.value)}"


NAMED = ("epoch_aware", "global_decay", "linear_decay")
"""Schedules that a guided file may just name."""


def like_the_origin(kind: str, base: float) -> Schedule:
    """The origin's schedules, which it ran at 0.05, from another base σ: a decay by 100 in all."""
    if kind != "epoch_aware":
        return (GlobalDecay if kind == "global_decay" else LinearDecay)(base, base / 100)
    return EpochAware(((base, base / 5), (base / 5, base / 100)))


def _between(start: float, end: float, part: float) -> float:
    """From start (part 0) to end (part 1) in geometric progression; exact at both, and never outside of them."""
    return end if part == 1 else min(start, max(end, start * (end / start) ** part))


def _check_falls(start: float, end: float, to_zero: bool = False) -> None:
    check_size("σ", start, above=0.0)
    check_size("σ", end, above=None if to_zero else 0.0)
    if end > start:
        raise ShaketableError(f"a decay ends at or below its start, and {end:g} is above {start:g}")


def check_size(name: str, value: object, above: float | None = None) -> None:
    """Raise unless a value is a finite number of 0 or more, or above a bound."""
    good = isinstance(value, int | float) and math.isfinite(value) and (value >= 0 if above is None else value > above)
    if not good:
        raise ShaketableError(f"{name} must be a number {'of 0 or more' if above is None else f'above {above:g}'}, not {value}")


def number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return repr(value).removesuffix(".0")

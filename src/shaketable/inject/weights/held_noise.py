"""Weight noise that is drawn once per rollout and held for all of its forwards.

A sampler whose weights change at every token is not one noisy policy but a thousand of them, and no policy gradient is
about it. So the key of a held tap is (seed, place, step, number of the rollout in the step, rank): every forward of one rollout
sees one weight, the next rollout another, and a run that resumes at step k sees there what an uninterrupted one saw. The key
leaves out the clause, so that arms which group their layers in another way share their noise.

Training forwards (where a plan acts on them) take the noise of the step's newest rollout: trainer and sampler then agree.

In a rollout without gradients the noisy weight is kept, and a forward costs a comparison. Elsewhere it is made again from
its key, because an optimizer may have changed the weight. Rejected: keeping the noise and adding it at every call, which
costs a pass over the weight and rounds twice. A draw is counted and measured once, however many forwards see it.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import PlanError
from shaketable.faults import FaultBase
from shaketable.faults.rng import key_of, mix64
from shaketable.inject.counters import capturing
from shaketable.inject.fault_operator import Application, apply
from shaketable.inject.pass_context import Frame, Pass
from shaketable.inject.tap import Tap
from shaketable.ledger.spot import Spot
from shaketable.sites.phases import current_rollout


class Rollouts:
    """The rollouts that the models of one injection took part in."""

    def __init__(self) -> None:
        self.total = 0
        self._numbers: dict[int, int] = {}
        self._newest: int | None = None
        self._lock = Lock()

    def begin_step(self) -> None:
        """Count the rollouts of the next step from zero."""
        with self._lock:
            self._numbers.clear()

    def number(self) -> int:
        """Which rollout of the step this is; outside of rollouts, the newest one."""
        now = current_rollout()
        if now is not None and now not in self._numbers:
            self._meet(now)
        return max(len(self._numbers) - 1, 0) if now is None else self._numbers[now]

    def _meet(self, now: int) -> None:
        with self._lock:
            self.total += now != self._newest
            self._newest = now
            self._numbers.setdefault(now, len(self._numbers))


Origin = tuple[int, int, bool]
"""Which weight: its address, its version, and whether inference mode is on."""


class HeldTap(Tap):
    """A fault on a weight, drawn once per rollout."""

    is_held = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._home: Tensor | None = None
        """Where noisy weights are on a GPU: one place, because captured graphs go on reading it."""

    def begin(self, spot: Spot) -> None:
        super().begin(spot)
        self._kept: tuple[tuple[int, FaultBase, Origin], Tensor] | None = None
        """The noisy weight, and what it was made from."""
        self._counted: dict[str, tuple[int, FaultBase]] = {}

    def make_keys(self) -> None:
        super().make_keys()
        self.place = key_of(self.injection.plan.seed, "held", self.name, self.injection.rank)

    @property
    def reads_tables(self) -> bool:
        """Only for gradients: a weight has its noise before a graph is captured, which reads it and nothing else."""
        return self.site.directions != ("forward",)

    def forget(self) -> None:
        """The weight is another one: its next draw counts, and is measured, whatever its key."""
        self._counted.clear()

    def key(self, current: Pass, backward: bool, use: int) -> int:
        """The key of the draw that holds now; gradients have keys of their own."""
        return super().key(current, backward, use) if backward else mix64(self.place ^ self._draw_number())

    def _draw_number(self) -> int:
        """Step and rollout in 64 bits: the same for all held taps of an injection."""
        return mix64(mix64(self.injection.calls.step) + self.injection.rollouts.number())

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        current = frame.current
        acts = current.acts_on(self) and not self.fault.is_off
        if not acts or current.phase != "rollout" or (x.requires_grad and torch.is_grad_enabled()):
            self._kept = None
            return super().forward(x, frame) if acts else x
        made_from = self.place ^ self._draw_number(), self.fault, _identity(x)
        if self._kept is None or self._kept[0] != made_from:
            self._kept = made_from, self._renewed(x, frame)
        return self._kept[1]

    def written(self, x: Tensor, phase: str) -> Tensor:
        """The weight with the noise of the draw that holds now, for whoever writes it into memory."""
        current = Pass(self.injection, phase, 0, self.injection.acting(phase), tuple(self.injection.faults))
        return apply(x, Application(self, current, False, 0, 0))

    def _renewed(self, x: Tensor, frame: Frame) -> Tensor:
        """The noisy weight of a new rollout."""
        if x.is_cuda and capturing():
            raise PlanError(f"{self.site.label}: read the prompt before a graph is captured: {self.name} has no noise yet")
        value = super().forward(x, frame)
        if not x.is_cuda:
            return value
        home = self._home
        if home is None or home.shape != x.shape or home.dtype != x.dtype or home.device != x.device:
            with torch.inference_mode(False):
                home = self._home = torch.empty_like(x)
        return home.copy_(value)

    def is_fire(self, what: Application) -> bool:
        if what.backward:
            return True
        phase, draw = what.current.phase, (what.key, what.fault)
        is_new = self._counted.get(phase) != draw
        self._counted[phase] = draw
        return is_new


def _identity(x: Tensor) -> Origin:
    """Another one when the weight was moved or written to; writes through `.data` show at the next rollout."""
    return x.data_ptr(), 0 if x.is_inference() else x._version, torch.is_inference_mode_enabled()

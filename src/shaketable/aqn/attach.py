"""AQN on a model: a plan, one clause per group of layers, whose magnitudes follow the schedule.

The noise lives in the phases that `where` names: an evaluation inside `with st.phase("eval"):` is clean, also when it
samples. Weights are never written to, so there is nothing to restore and a checkpoint saved in the middle of a rollout is
clean.

A dense model has noise on every RMSNorm, the final one included. A mixture of experts (read from its experts; `gate_proj` is
no sign of one) has it on `post_attention_layernorm` alone and never on a router: the origin's rule.

The ledger's `asked` is the mean σ over the measured draws. Two mistakes of a training loop are errors at the end: no rollout
had noise, and several rollouts happened without a change of the step.
"""

from __future__ import annotations

import math
from itertools import product
from threading import RLock
from types import TracebackType
from typing import Any, Self

from torch import nn

from shaketable.aqn.spec import AQN, NORMS, Group
from shaketable.errors import InertError, NoMatchError, ShaketableError
from shaketable.faults import make_fault
from shaketable.inject.attach import put_behind, refuse
from shaketable.inject.injection import Injection
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Clause, Plan, Site
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy

MOE_NORM = "post_attention_layernorm"
KINDS = {
    ("weight", "relative"): "rms_gaussian",
    ("weight", "absolute"): "absolute_gaussian",
    ("output", "relative"): "relative_gaussian",
    ("output", "absolute"): "absolute_gaussian",
}
PHASES = {"rollout": ("rollout",), "both": ("rollout", "train")}


def plan_of(aqn: AQN, anatomy: Anatomy) -> tuple[Plan, list[Group]]:
    """The plan, and the group of each of its clauses."""
    groups = aqn.groups(len(anatomy.layers))
    alone = len(groups) == 1
    kind = KINDS[aqn.form, aqn.unit]
    clauses: list[Clause] = []
    owners: list[Group] = []
    hit: set[int] = set()
    for group in groups:
        strongest = aqn.schedule.peak() * group.multiplier  # the magnitude follows the schedule once it is attached
        fault: Any = make_fault({"kind": kind, "magnitude": strongest})
        for site in _sites(aqn, group, anatomy, alone):
            clause = Clause(fault=fault, site=site)
            for target in targets(clause, anatomy):
                if id(target.part.module) in hit:  # a name outside of the layers can also end a name inside of them
                    raise ShaketableError(f"AQN would act on {target.part.name} twice; name the layers it should act on")
                hit.add(id(target.part.module))
            clauses.append(clause)
            owners.append(group)
    return Plan(clauses=tuple(clauses), seed=aqn.seed), owners


def check_order(aqn: AQN, noise: Plan, faults: Plan | None, anatomy: Anatomy) -> None:
    """Refuse `order=before` where there is nothing to come before: no plan, or none on an output that has noise."""
    if aqn.order != "before":
        return
    if faults is None:
        raise ShaketableError("order=before needs a plan, and there is none; drop order")
    if not _outputs(noise, anatomy) & _outputs(faults, anatomy):
        what = f"order=before: {faults.text()} acts on no output of a layer that has noise"
        raise NoMatchError(f"{what}; write it @layer.N for such a layer, or drop order")


def _outputs(plan: Plan, anatomy: Anatomy) -> set[int]:
    """The modules whose outputs a plan acts on going forward."""
    clauses = [c for c in plan.clauses if c.site.level != "op" and "forward" in c.site.directions]
    return {id(target.part.module) for clause in clauses for target in targets(clause, anatomy) if target.point == "output"}


def _sites(aqn: AQN, group: Group, anatomy: Anatomy, alone: bool) -> list[Site]:
    phase = PHASES[aqn.where]
    if aqn.form == "output":
        return [Site(level="layer", names=tuple(str(layer) for layer in group.layers), phase=phase)]
    here: dict[str, Any] = {"level": "module", "point": ("weight",), "phase": phase}
    names = beyond = tuple(aqn.roles)
    if anatomy.is_moe:
        names = tuple(dict.fromkeys(role if role in ("linear", *NORMS) else MOE_NORM for role in aqn.roles))
        beyond = tuple(role for role in aqn.roles if role == "linear")
    if alone and group.outside:
        return [Site(names=names, **here)]
    sites = [Site(names=names, layers=tuple(group.layers), **here)] if group.layers else []
    outside = [part.name for part in anatomy.parts if part.layer is None and part.role in beyond and part.weights]
    return [*sites, Site(names=tuple(outside), **here)] if group.outside and outside else sites


class AttachedAQN:
    """AQN on one model. Make it with `AQN.attach`."""

    def __init__(
        self,
        aqn: AQN,
        model: nn.Module,
        total_steps: int,
        *,
        step: int = 0,
        rank: int | None = None,
        allow_inert: bool = False,
        sampler: bool = False,
        plan: Injection | None = None,
    ) -> None:
        refuse(model)
        if not allow_inert:
            aqn.schedule.check(total_steps)
        self.aqn = aqn
        self.total_steps = total_steps
        self.allow_inert = allow_inert
        self.anatomy = Anatomy.of(model)
        clauses, self._groups = plan_of(aqn, self.anatomy)
        check_order(aqn, clauses, None if plan is None else plan.plan, self.anatomy)
        self.injection = Injection(clauses, step=step, rank=rank, allow_inert=True, hold=True, sampler=sampler)
        self.injection.attach(model)
        self._moved = False
        self._forced: float | None = None
        self._asked = [0.0] * len(self._groups)
        self._measured = [0] * len(self._groups)
        self._settling = RLock()
        """A report may be asked for by another thread while the step moves."""
        self._follow()
        self.stand_beside(plan)

    def stand_beside(self, plan: Injection | None) -> None:
        """Have noise and faults act on the outputs that both are at in the order of `aqn.order`, whichever came first.

        Hooks both, and switches neither on.
        """
        check_order(self.aqn, self.injection.plan, None if plan is None else plan.plan, self.anatomy)
        if plan is None or self.aqn.form != "output":
            return
        first, second = (self.injection, plan) if self.aqn.order == "before" else (plan, self.injection)
        for attached in (*first.models, *second.models):
            attached.hook()
        for earlier, later in product(first.models, second.models):
            put_behind(later, earlier)

    # ---- the step and σ

    @property
    def step(self) -> int:
        """The training step. Set it at the start of each; σ follows, and rollouts are counted from zero again."""
        return self.injection.step

    @step.setter
    def step(self, step: int) -> None:
        if step == self.step:
            return
        with self._settling:
            self._settle()
            with self.injection.changing():
                self.injection.step = step
                self._moved = True
                self._follow()

    @property
    def sigma(self) -> float:
        """The schedule's σ now, before multipliers and zones."""
        return self.aqn.schedule.sigma(self.step, self.total_steps) if self._forced is None else self._forced

    def force_sigma(self, sigma: float | None) -> None:
        """Put a σ in place of the schedule's, multipliers and zones as they are; None gives the schedule back."""
        if sigma is not None and not 0 <= sigma < math.inf:
            raise ShaketableError(f"σ must be 0 or above, not {sigma}")
        with self._settling:
            self._settle()
            with self.injection.changing():
                self._forced = sigma
                self._follow()

    @property
    def sigmas(self) -> dict[int, float]:
        """σ of each decoder layer that is hit, now."""
        pairs = ((layer, self._now(i)) for i, group in enumerate(self._groups) for layer in group.layers)
        return dict(sorted(pairs))

    def _now(self, clause: int) -> float:
        return self.aqn.sigma(self._groups[clause], self.step, self.total_steps, self._forced)

    def _follow(self) -> None:
        for i in range(len(self._groups)):
            self.injection.set_magnitude(self._now(i), i)

    def _settle(self) -> None:
        """Bring `asked` up to date with the draws since the last change of σ."""
        with self._settling:
            for i, site in enumerate(self.injection.ledger.sites):  # asks every GPU: once is enough
                measured = site.measured().magnitudes
                self._asked[i] += (measured - self._measured[i]) * self._now(i)
                self._measured[i] = measured
                if measured:
                    site.asked = self._asked[i] / measured

    # ---- what happened

    @property
    def ledger(self) -> Ledger:
        """What was drawn, and the σ that was measured: one fire per weight and rollout."""
        self._settle()
        return self.injection.ledger

    @property
    def rollouts(self) -> int:
        """How many rollouts the model took part in."""
        return self.injection.rollouts.total

    @property
    def modules_hit(self) -> tuple[str, ...]:
        """The weights, or layers, that the noise acts on."""
        return tuple(name for site in self.injection.ledger.sites for name in site.spots)

    def inert(self, *, trained: bool = False) -> list[str]:
        """One line for each group of layers that should have had noise by now and had none, as far as that is known.

        Rollouts while σ is 0 are left alone, and so is noise that rounding swallowed, unless σ is the same at every step.
        """
        with self._settling:
            found = self.injection.inert_check.inert(trained=trained)
            fired = {i for i, site in enumerate(self.injection.ledger.sites) if site.forward + site.backward}
        return [f"{self.aqn.text()}: {line}" for i, line in found.items() if i not in fired or self.aqn.is_steady]

    # ---- the switch

    @property
    def enabled(self) -> bool:
        """Whether rollouts have noise."""
        return self.injection.enabled

    def enable(self) -> Self:
        """Switch on."""
        self.injection.enable()
        return self

    def disable(self) -> Self:
        """Switch off, bit for bit."""
        self.injection.disable()
        return self

    def close(self, *, check: bool = True) -> None:
        """Take everything off the model. Raises `InertError` when no rollout had noise, or the step never moved."""
        if self.injection.closed:
            return
        self._settle()
        self.injection.close(check=False)
        if check and not self.allow_inert:
            self._check()

    def __enter__(self) -> Self:
        return self.enable()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(check=kind is None)

    def _check(self) -> None:
        seen, at = self.rollouts, f"step {self.step} of {self.total_steps}"
        text = self.aqn.text()
        if seen >= 2 and self.total_steps > 1 and not self._moved and not self.aqn.schedule.steady:
            raise InertError(f"{text}: {seen} rollouts, and the step stayed at {at}; set `noise.step = step` in the loop")
        if self.ledger.forward == 0 and seen == 0:
            raise InertError(f"{text}: no rollout; sample with model.generate or inside of `with st.phase('rollout'):`")
        if self.ledger.forward == 0:
            raise InertError(f"{text}: {seen} rollouts, none of them with noise; the last step was {at}")
        self.ledger.check()

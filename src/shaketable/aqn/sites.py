"""Which modules AQN is about, as clauses of a plan: one per group of layers that share a σ.

A mixture of experts has noise on `post_attention_layernorm` alone: neither on `input_layernorm` nor on the final norm, and
never on a router, where it has collapsed models. This is the origin's rule; we know of nothing that was measured for it.
Whether a model is one is read from its experts: `gate_proj` is no sign of it. A dense model has noise on every RMSNorm, the
final one included.
"""

from __future__ import annotations

from typing import Any

from shaketable.aqn.spec import AQN, NORMS, Group
from shaketable.errors import NoMatchError, ShaketableError
from shaketable.faults import make_fault
from shaketable.layer_ranges import Layers
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


def plan_of(aqn: AQN, anatomy: Anatomy, total_steps: int | None = None) -> tuple[Plan, list[Group]]:
    """The plan, and the group of each of its clauses; layers whose σ is 0 at every step of the run have none."""
    groups = aqn.groups(len(anatomy.layers))
    alone = len(groups) == 1
    if total_steps is not None and aqn.zones is not None:
        groups = [g for g in groups if any(aqn.sigma(g, step, total_steps) for step in range(total_steps))] or groups
    placed = [(site, group) for group in groups for site in _sites(aqn, group, anatomy, alone)]
    clauses = tuple(Clause(fault=_fault(aqn, group), site=site) for site, group in placed)
    _check_once(clauses, anatomy)
    return Plan(clauses=clauses, seed=aqn.seed), [group for _, group in placed]


def check_order(aqn: AQN, noise: Plan, faults: Plan | None, anatomy: Anatomy) -> None:
    """Refuse `order=before` where there is nothing to come before: no plan, or none on an output that has noise."""
    if aqn.order != "before":
        return
    if faults is None:
        raise ShaketableError("order=before puts the noise before the faults of a plan, and there is no plan; drop order")
    if not _outputs(noise, anatomy) & _outputs(faults, anatomy):
        what = f"order=before: {faults.text()} acts on no output of a layer that has noise"
        raise NoMatchError(f"{what}; write it @layer.N for such a layer, or drop order")


def _outputs(plan: Plan, anatomy: Anatomy) -> set[int]:
    """The modules whose outputs a plan acts on going forward."""
    clauses = [c for c in plan.clauses if c.site.level != "op" and "forward" in c.site.directions]
    return {id(target.part.module) for clause in clauses for target in targets(clause, anatomy) if target.point == "output"}


def _fault(aqn: AQN, group: Group) -> Any:
    """The fault at its strongest; its magnitude follows the schedule once it is attached."""
    return make_fault({"kind": KINDS[aqn.form, aqn.unit], "magnitude": aqn.schedule.peak() * group.multiplier})


def _sites(aqn: AQN, group: Group, anatomy: Anatomy, alone: bool) -> list[Site]:
    phase = PHASES[aqn.where]
    if aqn.form == "output":
        return [Site(level="layer", names=tuple(str(layer) for layer in group.layers), phase=phase)]
    here: dict[str, Any] = {"level": "module", "point": ("weight",), "phase": phase}
    if alone and group.outside:
        return [Site(names=_names(aqn, anatomy), **here)]
    inside = [Site(names=_names(aqn, anatomy), layers=Layers.of(group.layers), **here)] if group.layers else []
    beyond = _beyond(aqn, anatomy) if group.outside else ()
    return [*inside, *([Site(names=beyond, **here)] if beyond else [])]


def _names(aqn: AQN, anatomy: Anatomy) -> tuple[str, ...]:
    if not anatomy.is_moe:
        return aqn.roles
    return tuple(dict.fromkeys(role if role in ("linear", *NORMS) else MOE_NORM for role in aqn.roles))


def _beyond(aqn: AQN, anatomy: Anatomy) -> tuple[str, ...]:
    """Names of what lies outside of the decoder layers and has a role that is asked for."""
    roles = [role for role in aqn.roles if role == "linear" or not anatomy.is_moe]
    return tuple(part.name for part in anatomy.parts if part.layer is None and part.role in roles and part.weights)


def _check_once(clauses: tuple[Clause, ...], anatomy: Anatomy) -> None:
    """No weight may have noise twice: a name outside of the layers can also end a name inside of them."""
    seen: set[int] = set()
    for clause in clauses:
        for target in targets(clause, anatomy):
            if id(target.part.module) in seen:
                raise ShaketableError(f"AQN would act on {target.part.name} twice; name the layers it should act on")
            seen.add(id(target.part.module))

"""Which modules a clause of a plan means. Zero is an error, with the nearest names."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shaketable.errors import NoMatchError, PlanError, nearest
from shaketable.layer_ranges import join_layers, parse_layers
from shaketable.plan import Clause, Site
from shaketable.sites.engine_modules import FUSED, is_engine_module, is_packed, reads_weight_of, why_not_experts
from shaketable.sites.structure import ROLES, Anatomy, Part, class_name

ALL_ROLES = ("linear", "rmsnorm", "layernorm")


@dataclass(frozen=True)
class Target:
    """One module at one point."""

    part: Part
    point: str


def targets(clause: Clause, anatomy: Anatomy) -> list[Target]:
    """The modules a module or layer clause hits.

    Raises:
        NoMatchError: Nothing matches; the message has the nearest names.
        PlanError: A module that matches cannot carry the fault (no weight there, integer input).
    """
    check_layers(clause.site, anatomy)
    parts = _layer_parts(clause.site, anatomy) if clause.site.level == "layer" else _module_parts(clause.site, anatomy)
    for point in clause.points:
        _check_point(clause, parts, point)
        _check_engine(clause, [p for p in parts if is_engine_module(p.module)], point, anatomy)
    return [Target(part, point) for part in parts for point in clause.points]


def check_layers(site: Site, anatomy: Anatomy) -> None:
    """Raise when the site names layers that the model does not have."""
    if _asked(site) is not None and not anatomy.layers:
        raise NoMatchError(f"{site.text()}: {type(anatomy.model).__name__} has no decoder layers")
    check_range(site, len(anatomy.layers))


def check_range(site: Site, count: int) -> None:
    """Raise when the site names layers beyond those that a model of so many has."""
    asked = _asked(site)
    if asked and asked[-1] >= count:
        raise NoMatchError(f"{site.text()}: layer {asked[-1]} is out of range; this model has layers 0-{count - 1}")


def _asked(site: Site) -> tuple[int, ...] | None:
    """The layers that a site names; None where it names none, and empty where it means all."""
    if site.level == "layer":
        return () if site.names == ("all",) else parse_layers("+".join(site.names))
    return site.layers


def _layer_parts(site: Site, anatomy: Anatomy) -> list[Part]:
    chosen = _asked(site) or range(len(anatomy.layers))
    by_id = {id(p.module): p for p in anatomy.parts}
    found = []
    for index in chosen:
        module = anatomy.layers[index]
        part = by_id.get(id(module))
        found.append(part or Part(module, f"layer.{index}", index, None))
    return found


def _module_parts(site: Site, anatomy: Anatomy) -> list[Part]:
    found: dict[int, Part] = {}
    for name in site.names:
        wanted = [p for p in anatomy.parts if _matches(p, name, site)]
        # what is left out by default can be included, or named: `module.lm_head`
        hits = [p for p in wanted if anatomy.excluded(p) in (None, name, *site.include)]
        if not hits:
            raise NoMatchError(_nothing(site, name, anatomy, wanted))
        found.update((id(p), p) for p in hits)
    return list(found.values())


def _matches(part: Part, name: str, site: Site) -> bool:
    if site.layers is not None and part.layer not in site.layers:
        return False
    if name in ROLES:
        return part.role == name or (name == "linear" and part.role in site.include and part.role != "embedding")
    if name == "all":
        return part.role in ALL_ROLES or part.role in site.include
    by_name = part.name != "" and (fnmatchcase(part.name, name) or fnmatchcase(part.name, f"*.{name}"))
    by_class = name != "*" and fnmatchcase(class_name(part.module), name)
    return by_name or by_class


def _nothing(site: Site, name: str, anatomy: Anatomy, wanted: list[Part]) -> str:
    model = type(anatomy.model).__name__
    if wanted:
        reason = anatomy.excluded(wanted[0])
        return f"{site.text()}: {wanted[0].name!r} is left out by default ({reason}); add include={reason}"
    names = {p.role for p in anatomy.parts if p.role} | {p.name.rsplit(".", 1)[-1] for p in anatomy.parts if p.name}
    classes = {class_name(p.module) for p in anatomy.parts}
    fused = FUSED.get(name)
    if fused is not None and any(is_engine_module(p.module) and p.name.endswith(f".{fused}") for p in anatomy.parts):
        return f"{site.text()}: {model} computes {name} inside of {fused}, for which write module.{fused}"
    where = f" in layers {join_layers(site.layers)}" if site.layers else ""
    names = {n for n in names if not n.isdigit()}
    return f"{site.text()}: nothing in {model} matches {name!r}{where}; {nearest(name, names | classes, shown=12)}"


def _check_point(clause: Clause, parts: list[Part], point: str) -> None:
    bare = [p for p in parts if point == "weight" and not p.weights]
    if bare:
        raise PlanError(f"{clause.text()}: {bare[0].name!r} has no weight of its own; use point=input or point=output")
    reads_ids = [p for p in parts if point == "input" and p.role == "embedding"]
    if reads_ids:
        raise PlanError(f"{clause.text()}: {reads_ids[0].name!r} reads integer token ids; use point=output or point=weight")


def _check_engine(clause: Clause, parts: list[Part], point: str, anatomy: Anatomy) -> None:
    """Refuse faults that cannot act in a sampling engine: heads are never called there, and weights are written to."""
    heads = [p for p in parts if p.role == "lm_head" and point != "weight"]
    if heads:
        raise PlanError(f"{clause.text()}: a sampling engine never calls {heads[0].name!r}, it only reads its weight")
    for part in parts:
        if (why := why_not_experts(part.module, point)) is not None:
            raise PlanError(f"{clause.text()}: {part.name!r} cannot be faulty there: {why}")
    for part, name in ((p, name) for p in parts if point == "weight" for name in p.weights):
        if is_packed(part.holder, name):
            raise PlanError(
                f"{clause.text()}: the weight of {part.name!r} was packed when the model was loaded; "
                "give the plan before the engine loads it"
            )
        if (other := reads_weight_of(part.holder, name, anatomy.model)) is not None:
            raise PlanError(f"{clause.text()}: {part.name!r} and {other!r} have one weight, and both would be faulty")

"""The plan language: faults at sites, and a seed. Imports no torch.

    FAULT[:MAGNITUDE][,param=value…]@SITE[,key=value…]      several joined by ';'

    relative_gaussian:0.05@op.matmul
    dead_zone:0.01,scope=token,sparsity=0.1@layer.15
    mxfp4@module.linear,point=weight+input

The same in YAML, field by field:

    seed: 7
    plan:
      - fault: dead_zone
        magnitude: 0.01
        scope: token
        site: layer.15
        phase: rollout

One line of text and one YAML item make the same `Clause`; `Plan.text()` writes it back in its shortest form. Every
message names what was wrong, what is valid, and the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from shaketable.errors import PlanError, first_problem, nearest
from shaketable.faults import KINDS, Fault, FaultBase, Format, MagnitudeFault, make_fault
from shaketable.io.yaml_file import read_yaml
from shaketable.layer_ranges import join_layers, parse_layers

T = TypeVar("T", bound=BaseModel)
Level = Literal["module", "layer", "op"]
LEVELS = ("module", "layer", "op")
POINTS = ("input", "output", "weight")
PHASES = ("rollout", "train", "eval")
DIRECTIONS = ("forward", "backward", "both")
INCLUDABLE = ("lm_head", "embedding", "router", "lora", "rotary")
OPS = ("matmul", "softmax", "silu", "gelu", "layer_norm", "rms_norm", "sdpa")
SITE_KEYS = ("point", "direction", "layers", "phase", "include")


class Site(BaseModel):
    """Where and when: names at one level, which tensor, which way, which layers, which phases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level
    names: tuple[str, ...]
    """Roles, class names or name globs (module), layer indices (layer), operator families (op)."""
    point: tuple[str, ...] = ()
    """input, output, weight; what the fault prefers when empty."""
    direction: str = ""
    """forward, backward or both; both for operators and forward for the rest when empty."""
    layers: tuple[int, ...] | None = None
    """Only these decoder layers."""
    phase: tuple[str, ...] = ()
    """Only these phases; all when empty."""
    include: tuple[str, ...] = ()
    """What is left out by default and wanted here: lm_head, embedding, router, lora."""

    @field_validator("names", "point", "phase", "include")
    @classmethod
    def _each_once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(values))

    @field_validator("layers")
    @classmethod
    def _in_order(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if layers is None else tuple(sorted(set(layers)))

    @model_validator(mode="after")
    def _names_are_valid(self) -> Site:
        if not self.names or not all(self.names) or re.search("[,;+]", "".join(self.names)):
            raise ValueError("a site needs names without , ; + after its level, such as module.linear, layer.3 or op.matmul")
        if self.level == "op":
            for name in self.names:
                _one_of("operator family", name, (*OPS, "all"))
        if self.level == "layer" and self.names != ("all",):
            parse_layers("+".join(self.names))
        for key, valid in (("point", POINTS), ("phase", PHASES), ("include", INCLUDABLE)):
            for value in getattr(self, key):
                _one_of(key, value, valid)
        if self.direction:
            _one_of("direction", self.direction, DIRECTIONS)
        return self

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions in effect."""
        chosen = self.direction or ("both" if self.level == "op" else "forward")
        return ("forward", "backward") if chosen == "both" else (chosen,)

    @property
    def label(self) -> str:
        """Level and names: `module.linear`."""
        return f"{self.level}.{'+'.join(self.names)}"

    def text(self) -> str:
        """The site as the plan language writes it."""
        layers = None if self.layers is None else join_layers(self.layers)
        words = {"point": "+".join(self.point), "direction": self.direction, "layers": layers}
        words |= {"phase": "+".join(self.phase), "include": "+".join(self.include)}
        return ",".join([self.label, *(f"{key}={value}" for key, value in words.items() if value)])


class Clause(BaseModel):
    """One fault at one site."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: SerializeAsAny[Fault]
    site: Site

    @model_validator(mode="after")
    def _is_supported(self) -> Clause:
        points, level = self.points, self.site.level
        if level == "op" and isinstance(self.fault, Format):
            raise ValueError(f"{self.fault.kind} works on modules, e.g. {self.fault.kind}@module.linear,point=weight+input")
        if level == "op" and points != ("output",):
            raise ValueError("operator sites take no point: the error is on what the operator computes")
        if level == "layer" and "weight" in points:
            raise ValueError("layer sites take point=input or point=output; name the weight's module instead")
        if level == "layer" and self.site.layers is not None:
            raise ValueError("layer sites name their layers already: drop layers=")
        return self

    @property
    def points(self) -> tuple[str, ...]:
        """The points in effect."""
        default = self.fault.points if self.site.level == "module" else ("output",)
        return self.site.point or default

    def text(self) -> str:
        """The clause as the plan language writes it."""
        return f"{self.fault.text()}@{self.site.text()}"


class Plan(BaseModel):
    """Faults at sites, in the order in which they act, and a seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clauses: tuple[Clause, ...]
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)

    @field_validator("clauses")
    @classmethod
    def _is_not_empty(cls, clauses: tuple[Clause, ...]) -> tuple[Clause, ...]:
        if not clauses:
            raise ValueError("the plan is empty; write e.g. relative_gaussian:0.01@module.linear")
        return clauses

    @field_serializer("clauses")
    def _as_text(self, clauses: tuple[Clause, ...]) -> list[str]:
        return [c.text() for c in clauses]

    def text(self) -> str:
        """The plan in the plan language; `Plan.parse` gives it back."""
        return ";".join(c.text() for c in self.clauses)

    @classmethod
    def parse(cls, text: str, *, seed: int = 0, magnitude: float | None = None) -> Plan:
        """Read a plan from a line of text.

        Args:
            text: The plan language.
            seed: Keys all randomness.
            magnitude: For faults written without one (a sweep fills it in).
        """
        clauses = tuple(_clause(part, magnitude) for part in text.split(";") if part.strip())
        return _checked(cls, {"clauses": clauses, "seed": seed}, "plan")

    @classmethod
    def load(cls, source: str | Path | Plan, *, seed: int | None = None) -> Plan:
        """A plan from a plan, a line of text, or the path of a YAML file; `seed` overrides the file's own."""
        if isinstance(source, Plan):
            return source if seed is None else _checked(cls, {"clauses": source.clauses, "seed": seed}, "plan")
        if isinstance(source, Path) or re.search(r"\.ya?ml$", source.strip()):
            path = source if isinstance(source, Path) else Path(source.strip())
            return cls.from_data(read_yaml(path, "the plan file", PlanError), seed=seed, name=str(path))
        return cls.parse(source, seed=seed or 0)

    @classmethod
    def from_data(cls, data: object, *, seed: int | None = None, name: str = "plan") -> Plan:
        """A plan from what a YAML file holds: a mapping with `plan` and `seed`, or a bare list."""
        body = data if isinstance(data, Mapping) else {"plan": data}
        for key in body:
            _one_of("plan file key", str(key), ("plan", "seed"))
        items = body.get("plan")
        items = [items] if isinstance(items, str) else items
        if not isinstance(items, list):
            raise PlanError(f"{name}: 'plan' must be a list of clauses, not {type(items).__name__}")
        clauses = tuple(c for item in items for c in _item(item))
        chosen = body.get("seed", 0) if seed is None else seed
        return _checked(cls, {"clauses": clauses, "seed": chosen}, name)


def _one_of(what: str, value: str, valid: tuple[str, ...] | dict[str, Any]) -> None:
    if value not in valid:
        raise PlanError(f"unknown {what} {value!r}; {nearest(value, valid, shown=20)}")


def _clause(text: str, magnitude: float | None) -> Clause:
    left, at, right = text.strip().partition("@")
    if not at:
        raise PlanError(
            f"{text.strip()!r} names no site; write FAULT[:MAGNITUDE]@SITE, e.g. {left or 'gain:0.1'}@module.linear"
        )
    head, *params = left.split(",")
    kind, colon, number = head.strip().partition(":")
    place, *keys = right.split(",")
    given: dict[str, Any] = _pairs([*params, *keys], text)
    if twice := given.keys() & {"fault", "site", *(["magnitude"] if colon else [])}:
        raise PlanError(f"{min(twice)} is given twice in {text.strip()!r}")
    fields = {"fault": kind.strip(), "site": place.strip(), **given}
    if colon:
        fields["magnitude"] = number.strip()
    elif magnitude is not None and "magnitude" in KINDS.get(kind.strip(), FaultBase).model_fields:
        fields.setdefault("magnitude", magnitude)
    return _from_fields(fields)


def _pairs(parts: list[str], text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in parts:
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not key or not value:
            raise PlanError(f"{part.strip()!r} in {text.strip()!r} is not key=value")
        if key in pairs:
            raise PlanError(f"{key} is given twice in {text.strip()!r}")
        pairs[key] = value
    return pairs


def _item(item: object) -> tuple[Clause, ...]:
    """Clauses of one YAML item: a line of text or a mapping."""
    if isinstance(item, str):
        return Plan.parse(item).clauses
    if not isinstance(item, Mapping):
        raise PlanError(f"a clause is a line of text or a mapping with fault and site, not {item!r}")
    return (_from_fields({str(k): v for k, v in item.items()}),)


def _from_fields(fields: dict[str, Any]) -> Clause:
    """A clause from flat fields: those of the fault, `site`, and the keys of the site."""
    missing = [k for k in ("fault", "site") if not fields.get(k)]
    if missing:
        has = ", ".join(f"{key}={value}" for key, value in fields.items()) or "nothing"
        raise PlanError(f"a clause needs {' and '.join(missing)}: it has {has}")
    kind = str(fields.pop("fault"))
    place = str(fields.pop("site"))
    _one_of("fault", kind, KINDS)
    own = {k: v for k, v in fields.items() if k not in SITE_KEYS}
    keys = {k: v for k, v in fields.items() if k in SITE_KEYS}
    return _checked(Clause, {"fault": _fault(kind, own), "site": _site(place, keys)}, kind)


def _fault(kind: str, params: dict[str, Any]) -> FaultBase:
    known = KINDS[kind].model_fields
    takes = issubclass(KINDS[kind], MagnitudeFault)
    if "magnitude" in params and not takes:
        raise PlanError(f"{kind} is a format and takes no magnitude; write {kind}@module.linear")
    if "magnitude" not in params and takes:
        raise PlanError(f"{kind} needs a magnitude, e.g. {kind}:0.01")
    for key in params:
        _one_of(f"key for {kind}", key, tuple(k for k in known if k != "kind") + SITE_KEYS)
    try:
        return make_fault({"kind": kind, **params})
    except ValidationError as error:
        raise PlanError(f"{kind}: {first_problem(error, skip=('fault', *KINDS))}") from None


def _site(place: str, keys: dict[str, Any]) -> Site:
    level, dot, names = place.partition(".")
    _one_of("site level", level, LEVELS)
    if not dot or not names:
        raise PlanError(f"the site {place!r} names nothing; write e.g. module.linear, layer.3 or op.matmul")
    fields: dict[str, Any] = {"level": level, "names": tuple(n.strip() for n in names.split("+"))}
    for key, value in keys.items():
        if key == "direction":
            fields[key] = str(value)
        elif key == "layers":
            fields[key] = parse_layers("+".join(str(v) for v in value) if isinstance(value, list) else str(value))
        else:
            fields[key] = tuple(value) if isinstance(value, list) else tuple(v.strip() for v in str(value).split("+"))
    return _checked(Site, fields, place)


def _checked(model: type[T], fields: dict[str, Any], name: str) -> T:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise PlanError(f"{name}: {first_problem(error, skip=('fault', *KINDS))}") from None

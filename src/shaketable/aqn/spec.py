"""AQN, adaptive quantization noise: data, its one line of text, and its files. Imports no torch.

Form `weight` (QeRL's): while a policy samples, its norms read w + z·σ·rms(w) in place of w (unit `relative`), or w + z·σ (unit
`absolute`, QeRL's own), with one z for the whole rollout. Form `output`: chosen decoder layers return y + z·σ·|y|, or y + z·σ,
with a new z at every call; `order` says whether that is before or after a fault on the same output. σ of layer l at a step is

    σ_l = schedule(step) · multiplier_l · zone factor(step)

`groups` splits the layers into those that share one σ at every step. Each becomes one clause of a plan whose magnitude
follows the schedule (`attach.py`); the table and the plot before a run are made from the same groups.

One line of text, `SCHEDULE:SIGMAS[,key=value…]`:

    global_decay:0.05-0.0005,stages=10
    linear_decay:0.05-0.0005
    epoch_aware:0.05-0.01+0.01-0.0005            or epoch_aware:0.05-0.0005,epochs=3
    constant:0.01,form=output,layers=15,where=both,unit=absolute,order=before
    global_decay:0.05-0.0005,multipliers=0:2+27:0.5,zones=edge:0.2+middle:0.5+after:0.5     (zones=on for the usual ones)

A YAML file holds the fields of `AQN`, `schedule` being such a line or a mapping. A guided file (key `aqn`) has
layer_sigma/base_sigma as multipliers; `layers` in it names all layers with noise. One that has `srdd_metadata` and no
`layers` is the origin's own: noise on what decoder layers return, in rollouts and in training, with the base σ for layers
that it does not name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shaketable.aqn.schedules import (
    NAMED,
    SCHEDULES,
    AnySchedule,
    Constant,
    Described,
    EpochAware,
    GlobalDecay,
    LinearDecay,
    Schedule,
    ScheduleBase,
    checked,
    like_the_origin,
    number,
)
from shaketable.errors import NoMatchError, ShaketableError, nearest
from shaketable.io.yaml_file import read_yaml
from shaketable.layer_ranges import join_layers, parse_layers

if TYPE_CHECKING:
    from torch import nn

    from shaketable.aqn.attach import AttachedAQN
    from shaketable.inject.injection import Injection

ROLES = ("rmsnorm", "layernorm", "linear")
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms that can be meant by their names, where not all of them are."""
Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Layer = Annotated[int, Field(ge=0)]


class Zones(Described):
    """Layers at both edges keep their σ; those in the middle have less from some point of the run on."""

    edge: float = Field(default=0.25, ge=0, lt=0.5)
    """Share of the layers, at each end, that are edge layers; rounded up."""
    middle: Factor = 0.5
    """Factor of the middle layers, later in the run."""
    after: float = Field(default=0.5, ge=0, le=1)
    """Part of the run after which it holds."""

    def is_middle(self, layer: int, count: int) -> bool:
        """Whether a layer of a model with `count` layers is a middle one."""
        edge = math.ceil(self.edge * count)
        return edge <= layer < count - edge

    def factor(self, middle: bool, step: int, total_steps: int) -> float:
        """What σ is multiplied by."""
        return self.middle if middle and step >= self.after * total_steps else 1.0


@dataclass(frozen=True)
class Group:
    """Layers that share one σ at every step."""

    label: str
    layers: tuple[int, ...]
    multiplier: float
    middle: bool
    outside: bool
    """Whether what lies outside of the decoder layers (the final norm) belongs to it."""


class AQN(Described):
    """Noise in the sampler, on a schedule.

    aqn = st.AQN(st.GlobalDecay(0.05, 0.0005, stages=10))
    with aqn.attach(model, total_steps=100) as noise:
        for step in range(100):
            noise.step = step
            model.generate(...)
    """

    schedule: Schedule
    """σ over the steps."""
    unit: Literal["relative", "absolute"] = "relative"
    """σ in units of the weight's RMS (or of each output), or as it is."""
    form: Literal["weight", "output"] = "weight"
    """Noise on the weights of norms, or on what decoder layers return."""
    roles: tuple[str, ...] = ("rmsnorm",)
    """Whose weights: rmsnorm, layernorm, linear; or norms by name, input_layernorm and post_attention_layernorm."""
    layers: tuple[Layer, ...] | None = None
    """Only these decoder layers; all of them, and the final norm, when None."""
    multipliers: dict[Layer, Factor] = Field(default_factory=dict)
    """Factors of single layers; 0 is no noise, and a layer without one has 1."""
    zones: Zones | None = None
    """Less noise in the middle layers, later in the run."""
    where: Literal["rollout", "both"] = "rollout"
    """Noise while sampling only, or in the forwards and backwards of training too."""
    order: Literal["before", "after"] = "after"
    """Where a plan's fault acts on the same output of a layer: the noise is added before it, or after it."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    """Keys all noise."""

    if TYPE_CHECKING:

        def __init__(
            self,
            schedule: ScheduleBase | Mapping[str, Any],
            *,
            unit: str = "relative",
            form: str = "weight",
            roles: str | Sequence[str] = ("rmsnorm",),
            layers: str | Iterable[int] | None = None,
            multipliers: Mapping[int, float] = ...,
            zones: Zones | Mapping[str, float] | None = None,
            where: str = "rollout",
            order: str = "after",
            seed: int = 0,
        ) -> None: ...

    @field_validator("roles", mode="before")
    @classmethod
    def _roles_are_known(cls, roles: object) -> object:
        roles = (roles,) if isinstance(roles, str) else roles
        for role in roles if isinstance(roles, Sequence) else ():
            if role not in ROLES + NORMS:
                raise ValueError(f"unknown role {role!r}; {nearest(str(role), ROLES + NORMS)}")
        if not roles:
            raise ValueError(f"name at least one role; valid: {', '.join(ROLES)}")
        return roles

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_sorted(cls, layers: object) -> object:
        if layers is None or layers == "all":
            return None
        if isinstance(layers, str):
            return parse_layers(layers).indices()
        if isinstance(layers, Sequence) and not layers:
            raise ValueError("layers names no layer; leave it out for all")
        return sorted(set(layers)) if isinstance(layers, list | tuple | range | set) else layers

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.form == "output" and self.roles != ("rmsnorm",):
            raise ValueError("form=output acts on what decoder layers return; roles are for form=weight")
        if self.order == "before" and self.form != "output":
            raise ValueError("order is for form=output: weights are read before any output is there")
        stray = sorted(set(self.multipliers) - set(self.layers)) if self.layers is not None else []
        if stray:
            raise ValueError(f"multipliers name layer {stray[0]}, which layers={join_layers(self.layers or ())} leaves out")
        return self

    @property
    def is_steady(self) -> bool:
        """Whether every layer has the same σ at every step."""
        return self.schedule.steady and self.zones is None

    def groups(self, count: int | None) -> list[Group]:
        """The layers of a model with `count` layers, by their σ; None where the model is not known yet."""
        if count is None:
            return self._unknown_groups()
        asked = [*(self.layers or ()), *self.multipliers]
        if count == 0 and (asked or self.zones is not None or self.form == "output"):
            raise NoMatchError("AQN on chosen layers, or on the outputs of layers: this model has no decoder layers")
        if asked and max(asked) >= count:
            raise NoMatchError(f"layer {max(asked)} is out of range; this model has layers 0-{count - 1}")
        found: dict[tuple[float, bool], list[int]] = {}
        if self.layers is None and self.form == "weight":
            found[1.0, False] = []
        for layer in range(count) if self.layers is None else self.layers:
            middle = self.zones is not None and self.zones.is_middle(layer, count)
            found.setdefault((self.multipliers.get(layer, 1.0), middle), []).append(layer)
        if self.zones is not None and not any(middle for _, middle in found):
            raise NoMatchError(f"zones: none of the layers of a model with {count} is a middle one; lower edge")
        groups = _labelled(found, self.layers is None and self.form == "weight", count)
        if not groups:
            raise NoMatchError("every layer has the multiplier 0: there would be no noise")
        return groups

    def _unknown_groups(self) -> list[Group]:
        """Each group once for the layers at the edges and once for those in the middle, where there are zones."""
        found: dict[tuple[float, bool], list[int]] = {}
        for layer in self.layers if self.layers is not None else sorted(self.multipliers):
            found.setdefault((self.multipliers.get(layer, 1.0), False), []).append(layer)
        groups = _labelled(found, False, None)
        if self.layers is None:
            groups.insert(0, Group("all other layers" if groups else "all layers", (), 1.0, False, True))
        if self.zones is None:
            return groups
        return [
            replace(g, label=f"{g.label} ({'middle' if middle else 'edge'})", middle=middle, outside=g.outside and not middle)
            for g in groups
            for middle in (False, True)
        ]

    def sigma(self, group: Group, step: int, total_steps: int, base: float | None = None) -> float:
        """σ of a group's layers at a step; `base` replaces the schedule's."""
        zone = self.zones.factor(group.middle, step, total_steps) if self.zones is not None else 1.0
        return (self.schedule.sigma(step, total_steps) if base is None else base) * group.multiplier * zone

    def attach(
        self,
        model: nn.Module,
        total_steps: int,
        *,
        step: int = 0,
        rank: int | None = None,
        allow_inert: bool = False,
        sampler: bool = False,
        plan: Injection | None = None,
    ) -> AttachedAQN:
        """Put the noise on a model; a context manager.

        Args:
            model: Any PyTorch model; `model.generate` and `with st.phase("rollout"):` are its rollouts.
            total_steps: Steps of the whole run, which the schedule is stretched over.
            step: First step of a resumed run.
            rank: Keys the noise of this process; the distributed rank by default.
            allow_inert: Accept a run in which no rollout has noise.
            sampler: The model lives in a sampling engine (see `Injection`).
            plan: The faults on the same model, which the noise comes before or after (`order`).

        Raises:
            NoMatchError: Nothing in the model answers to `roles` and `layers`, or `order` has nothing to put in order.
            ShaketableError: σ would be 0 at every step.
        """
        from shaketable.aqn.attach import AttachedAQN

        return AttachedAQN(self, model, total_steps, step=step, rank=rank, allow_inert=allow_inert, sampler=sampler, plan=plan)

    def text(self) -> str:
        """One line that `AQN.load` reads back."""
        usual = {key: AQN.model_fields[key].get_default(call_default_factory=True) for key in KEYS}
        given = {key: getattr(self, key) for key in KEYS}
        parts = [f"{key}={_shown(key, value)}" for key, value in given.items() if value != usual[key]]
        return ",".join([self.schedule.text(), *parts])

    @classmethod
    def load(cls, source: str | Path | AQN) -> AQN:
        """AQN from a line such as `global_decay:0.05-0.0005,stages=10`, or from a YAML file (of `shaketable guide`, too)."""
        if isinstance(source, AQN):
            return source
        if isinstance(source, Path) or re.search(r"\.ya?ml$", source.strip()):
            return _from_file(source if isinstance(source, Path) else Path(source.strip()))
        return _parse(source)


def _labelled(found: dict[tuple[float, bool], list[int]], outside: bool, count: int | None) -> list[Group]:
    """Groups with noise, in the order of their first layers; `outside` goes with factor 1 outside of the middle."""
    groups = []
    for (multiplier, middle), layers in found.items():
        beyond = outside and (multiplier, middle) == (1.0, False)
        if multiplier == 0 or not (layers or beyond):
            continue
        groups.append(Group(_label(layers, beyond, count), tuple(layers), multiplier, middle, beyond))
    return groups


def _label(layers: Sequence[int], beyond: bool, count: int | None) -> str:
    if count is not None and len(layers) == count:
        return "all layers" if not beyond or count else "the whole model"
    names = f"{'layer' if len(layers) == 1 else 'layers'} {join_layers(tuple(layers))}" if layers else ""
    return " and ".join(part for part in (names, "outside of layers" if beyond else "") if part)


# ---- one line of text


KEYS = tuple(name for name in AQN.model_fields if name != "schedule")
OWN = {"global_decay": ("stages",), "linear_decay": (), "epoch_aware": ("epochs",), "constant": ()}
EXAMPLES = {
    "global_decay": "global_decay:0.05-0.0005,stages=10",
    "linear_decay": "linear_decay:0.05-0.0005",
    "epoch_aware": "epoch_aware:0.05-0.01+0.01-0.0005",
    "constant": "constant:0.01",
}
_NUMBER = r"\d*\.?\d+(?:[eE][+-]?\d+)?|\d+\."


def _parse(line: str) -> AQN:
    """AQN from a line of text."""
    schedule, pairs = _with_schedule(line)
    for key in pairs:
        _one_of(f"key for {schedule.kind}", key, (*OWN[schedule.kind], *KEYS))
    return AQN(schedule, **{key: _READ.get(key, str)(value) for key, value in pairs.items()})


def _with_schedule(line: str) -> tuple[AnySchedule, dict[str, str]]:
    """The schedule that a line begins with, and its other keys."""
    head, *parts = line.strip().split(",")
    pairs = _pairs(parts, line)
    kind = head.partition(":")[0].strip()
    own = {key: pairs.pop(key) for key in OWN.get(kind, ()) if key in pairs}
    return _schedule(head, own), pairs


def _shown(key: str, value: Any) -> str:
    if key == "layers":
        return join_layers(value)
    if isinstance(value, Zones):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return "+".join(f"{k}:{number(v)}" for k, v in value.items())
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _schedule(head: str, own: dict[str, str]) -> AnySchedule:
    kind, _, values = (part.strip() for part in head.partition(":"))
    _one_of("schedule", kind, tuple(SCHEDULES))
    example = f"e.g. {EXAMPLES[kind]}"
    if not values:
        raise ShaketableError(f"{kind} needs its σ, {example}")
    if kind == "constant":
        if not re.fullmatch(_NUMBER, values):
            raise ShaketableError(f"{values!r} is not a σ; write a number of 0 or more, {example}")
        return Constant(float(values))
    decays = []
    for text in re.split(r"(?<![eE])\+", values):
        if not (match := re.fullmatch(rf"\s*({_NUMBER})\s*-\s*({_NUMBER})\s*", text)):
            raise ShaketableError(f"{text.strip()!r} is not START-END of σ; write {example}")
        decays.append((float(match[1]), float(match[2])))
    if kind == "epoch_aware" and "epochs" not in own:
        return EpochAware(tuple(decays))
    if len(decays) != 1:
        raise ShaketableError(f"{kind}:{values} has several decays where one is expected, {example}")
    if kind == "epoch_aware":
        return EpochAware.between(*decays[0], _whole("epochs", own["epochs"]))
    if kind == "linear_decay":
        return LinearDecay(*decays[0])
    return GlobalDecay(*decays[0], **{key: _whole(key, text) for key, text in own.items()})


def _whole(key: str, text: str) -> int:
    if not re.fullmatch(r"\s*-?\d{1,9}\s*", text):
        raise ShaketableError(f"{key}={text} is not a whole number")
    return int(text)


def _pairs(parts: list[str], line: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in parts:
        key, equals, value = (p.strip() for p in part.partition("="))
        if not (key and equals and value):
            raise ShaketableError(f"{part.strip()!r} in {line.strip()!r} is not key=value")
        if key in pairs:
            raise ShaketableError(f"{key} is given twice in {line.strip()!r}")
        pairs[key] = value
    return pairs


def _factors(text: str) -> dict[str, float]:
    """`0:2+27:0.5`, or `edge:0.2+after:0.5`."""
    found: dict[str, float] = {}
    for part in re.split(r"(?<![eE])\+(?=\s*\w+\s*:)", text):
        match = re.fullmatch(rf"\s*(\w+)\s*:\s*({_NUMBER})\s*", part)
        if not match or match[1] in found:
            raise ShaketableError(f"{part.strip()!r} in {text!r} is not NAME:FACTOR, each name once; write e.g. 0:2+27:0.5")
        found[match[1]] = float(match[2])
    return found


_READ: dict[str, Any] = {
    "roles": lambda text: tuple(part.strip() for part in text.split("+")),
    "layers": lambda text: None if text == "all" else parse_layers(text).indices(),
    "multipliers": _factors,
    "zones": lambda text: Zones(**({} if text == "on" else _factors(text))),
    "seed": lambda text: _whole("seed", text) if len(text) < 10 else text,
}


def _one_of(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ShaketableError(f"unknown {what} {value!r}; {nearest(value, valid, shown=12)}")


# ---- files


class _Guided(BaseModel):
    """The part of a guided file that is not AQN's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool
    layer_specific: Literal[True]
    base_sigma: float = Field(gt=0)
    layers: tuple[int, ...] | None = None
    """All layers with noise."""
    layer_sigmas: dict[int, float] = Field(min_length=1)
    high_priority_layers: list[int] = []
    """Those that `guide` labelled HIGH: for readers, and what `--target high` keeps."""


class _Scanned(BaseModel):
    """What the origin's file says of its scans; its date and the like are left alone."""

    model_config = ConfigDict(frozen=True)

    num_layers: int = Field(ge=1, le=10**6)


def _from_file(path: Path) -> AQN:
    data = read_yaml(path, "the AQN file")
    if not isinstance(data, Mapping):
        raise ShaketableError(f"the AQN file {path} must hold a mapping, not {type(data).__name__}")
    return from_guidance(data, str(path)) if "aqn" in data else _from_fields(dict(data), path)


def _from_fields(fields: dict[Any, Any], path: Path) -> AQN:
    for key in fields:
        _one_of(f"key in {path}", str(key), ("schedule", *KEYS))
    if "schedule" not in fields:
        raise ShaketableError(f"the AQN file {path} has no schedule; write e.g. schedule: global_decay:0.05-0.0005,stages=10")
    return AQN(**{**fields, "schedule": _described(fields["schedule"])})


def _described(given: object) -> Any:
    """A schedule from a line of text; other data is left to the model."""
    if not isinstance(given, str):
        return given
    schedule, pairs = _with_schedule(given)
    for key in pairs:
        _one_of(f"key for {schedule.kind}", key, OWN[schedule.kind])
    return schedule


def from_guidance(data: Mapping[Any, Any], path: str) -> AQN:
    """AQN from what `shaketable guide`, or the origin's own script, writes, as data; `path` is how an error calls it."""
    for key in data:
        _one_of(f"key in {path}", str(key), ("aqn", "metadata", "srdd_metadata"))
    body = data["aqn"]
    if not isinstance(body, Mapping):
        raise ShaketableError(f"{path}: aqn must hold a mapping, not {type(body).__name__}")
    free = ("unit", "form", "roles", "zones", "where", "order", "seed")
    for key in body:
        _one_of(f"key in aqn of {path}", str(key), (*_Guided.model_fields, "schedule", *free))
    guided = checked(_Guided, {key: value for key, value in body.items() if key in _Guided.model_fields}, path)
    if not guided.enabled:
        raise ShaketableError(f"{path} says enabled: false; train without it instead")
    schedule = body.get("schedule", "epoch_aware")
    factors = {layer: float(f"{sigma / guided.base_sigma:.12g}") for layer, sigma in guided.layer_sigmas.items()}
    more = {str(key): body[key] for key in free if key in body}
    if guided.layers is not None:
        if stray := sorted(set(factors) - set(guided.layers)):
            raise ShaketableError(f"{path}: layer_sigmas name layer {stray[0]}, which layers leaves out")
        factors = {layer: factors.get(layer, 1.0) for layer in guided.layers}
    elif "srdd_metadata" in data:
        count = checked(_Scanned, data["srdd_metadata"], f"srdd_metadata of {path}").num_layers
        if beyond := next((layer for layer in factors if not 0 <= layer < count), None):
            raise ShaketableError(f"{path}: layer_sigmas name layer {beyond}, and srdd_metadata has {count} layers")
        factors = {layer: factors.get(layer, 1.0) for layer in range(count)}
        more = {"form": "output", "where": "both"} | more
    return AQN(
        like_the_origin(schedule, guided.base_sigma) if schedule in NAMED else _described(schedule),
        layers=tuple(sorted(factors)),
        multipliers={layer: factor for layer, factor in sorted(factors.items()) if factor != 1},
        **more,
    )

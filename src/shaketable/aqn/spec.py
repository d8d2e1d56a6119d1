"""AQN, adaptive quantization noise: what it is, as data. Imports no torch.

Form `weight` (QeRL's): while a policy samples, its norms read w + z·σ·rms(w) in place of w (unit `relative`), or w + z·σ (unit
`absolute`, QeRL's own), with one z for the whole rollout. Form `output`: chosen decoder layers return y + z·σ·|y|, or y + z·σ,
with a new z at every call; `order` says whether that is before or after a fault on the same output. In both, σ of layer l
at a step is

    σ_l = schedule(step) · multiplier_l · zone factor(step)

Relative is the default because absolute noise of 0.05 destroys a small model, whose norm weights are about that size.

`groups` splits the layers into those that share one σ at every step; the clauses of the injection, the table and the plot are
all made from it, so that what is printed before a run is what happens in it.

Rejected: adding noise to the parameters and taking it off after the rollout. An exception, a save or a second rollout in
between, and the noise stays: in the study we come from it accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shaketable.aqn.schedules import Described, Schedule, ScheduleBase
from shaketable.errors import NoMatchError, ShaketableError, nearest
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
        if self.zones is not None and (self.layers or self.multipliers):
            raise ShaketableError("zones with layers or multipliers depend on the number of layers; give the model")
        if self.zones is not None:
            return [Group("edge layers", (), 1.0, False, True), Group("middle layers", (), 1.0, True, False)]
        found: dict[tuple[float, bool], list[int]] = {}
        for layer in self.layers if self.layers is not None else sorted(self.multipliers):
            found.setdefault((self.multipliers.get(layer, 1.0), False), []).append(layer)
        named = _labelled(found, False, None)
        rest = "all other layers" if named else "all layers"
        return [Group(rest, (), 1.0, False, True), *named] if self.layers is None else named

    def sigma(self, group: Group, step: int, total_steps: int, base: float | None = None) -> float:
        """σ of a group's layers at a step; `base` stands in place of the schedule's."""
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
            step: Where a resumed run goes on.
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
        from shaketable.aqn.text import to_text

        return to_text(self)

    @classmethod
    def load(cls, source: str | Path | AQN) -> AQN:
        """AQN from a line such as `global_decay:0.05-0.0005,stages=10`, or from a YAML file (of `shaketable guide`, too)."""
        from shaketable.aqn.text import load

        return load(source)


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

"""AQN, adaptive quantization noise: data, its one line of text, and its files. Imports no torch.

Form `weight` (QeRL's): while a policy samples, its norms read w + z·σ·rms(w) in place of w (unit `relative`), or w + z·σ (unit
`absolute`, QeRL's own), with one z for the whole rollout. Form `output`: chosen decoder layers return y + z·σ·|y|, or y + z·σ,
with a new z at every call; `order` says whether that is before or after a fault on the same output. σ of layer l at a step is

    σ_l = schedule(step) · multiplier_l · zone factor(step)

With `zones`, the middle half of the layers has half of its σ in the second half of the run.

`groups` splits the layers into those that share one σ at every step. Each becomes one clause of a plan whose magnitude
follows the schedule (`attach.py`); the table and the plot before a run are made from the same groups.

One line of text, `SCHEDULE:SIGMAS[,key=value…]`:

    global_decay:0.05-0.0005,stages=10
    linear_decay:0.05-0.0005
    epoch_aware:0.05-0.01+0.01-0.0005            or epoch_aware:0.05-0.0005,epochs=3
    constant:0.01,form=output,layers=15,where=both,unit=absolute,order=before
    global_decay:0.05-0.0005,multipliers=0:2+27:0.5,zones=on

A YAML file is one of `shaketable guide` (key `aqn`): it has layer_sigma/base_sigma as multipliers, and `layers` in it names
all layers with noise. One that has `srdd_metadata` and no `layers` is the origin's own: noise on what decoder layers return,
in rollouts and in training, with the base σ for layers that it does not name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.aqn.schedules import (
    NAMED,
    Constant,
    EpochAware,
    GlobalDecay,
    LinearDecay,
    Schedule,
    check_size,
    like_the_origin,
    number,
)
from shaketable.errors import NoMatchError, ShaketableError, check_word
from shaketable.io.yaml_file import read_yaml
from shaketable.layer_ranges import join_layers, parse_layers

if TYPE_CHECKING:
    from torch import nn

    from shaketable.aqn.attach import AttachedAQN
    from shaketable.inject.injection import Injection

ROLES = ("rmsnorm", "layernorm", "linear")
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms that can be meant by their names, where not all of them are."""
CHOICES = {
    "unit": ("relative", "absolute"),
    "form": ("weight", "output"),
    "where": ("rollout", "both"),
    "order": ("before", "after"),
}
EDGE, MIDDLE, AFTER = 0.25, 0.5, 0.5
"""Zones: the share of the layers at each end that keep their σ, the factor of the others, and the part of the run after which
it holds."""
ZONES = f"edge:{EDGE}+middle:{MIDDLE}+after:{AFTER}"
"""What `text` writes for `zones=on`; the names of published runs depend on it."""


@dataclass(frozen=True)
class Group:
    """Layers that share one σ at every step."""

    label: str
    layers: tuple[int, ...]
    multiplier: float
    middle: bool
    outside: bool
    """Whether what lies outside of the decoder layers (the final norm) belongs to it."""


@dataclass(frozen=True)
class AQN:
    """Noise in the sampler, on a schedule.

    aqn = st.AQN(st.GlobalDecay(0.05, 0.0005, stages=10))
    with aqn.attach(model, total_steps=100) as noise:
        for step in range(100):
            noise.step = step
            model.generate(...)
    """

    schedule: Schedule
    """σ over the steps."""
    _: KW_ONLY
    unit: str = "relative"
    """σ in units of the weight's RMS (or of each output), or as it is (absolute)."""
    form: str = "weight"
    """Noise on the weights of norms, or on what decoder layers return (output)."""
    roles: Sequence[str] = ("rmsnorm",)
    """Whose weights: rmsnorm, layernorm, linear; or norms by name, input_layernorm and post_attention_layernorm."""
    layers: Sequence[int] | None = None
    """Only these decoder layers; all of them, and the final norm, when None."""
    multipliers: Mapping[int, float] = field(default_factory=dict)
    """Factors of single layers; 0 is no noise, and a layer without one has 1."""
    zones: bool = False
    """Less noise in the middle layers, later in the run."""
    where: str = "rollout"
    """Noise while sampling only, or in the forwards and backwards of training too (both)."""
    order: str = "after"
    """Where a plan's fault acts on the same output of a layer: the noise is added before it, or after it."""
    seed: int = 0
    """Keys all noise."""

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, valid in CHOICES.items():
            check_word(name, getattr(self, name), valid)
        keep("roles", (self.roles,) if isinstance(self.roles, str) else tuple(self.roles))
        for role in self.roles or ("",):
            check_word("role", role, ROLES + NORMS)
        keep("layers", _layers(self.layers))
        keep("multipliers", {int(layer): factor for layer, factor in self.multipliers.items()})
        for layer, factor in self.multipliers.items():
            check_size(f"multipliers: {layer}", factor)
        if not isinstance(self.zones, bool):
            raise ShaketableError(f"zones are on, or left out, and not {self.zones}")
        if not -(2**63) <= self.seed < 2**64:
            raise ShaketableError(f"seed {self.seed} has more than 64 bits")
        if self.form == "output" and self.roles != ("rmsnorm",):
            raise ShaketableError("form=output acts on what decoder layers return; roles are for form=weight")
        if self.order == "before" and self.form != "output":
            raise ShaketableError("order is for form=output: weights are read before any output is there")
        if self.layers is not None and (stray := sorted(set(self.multipliers) - set(self.layers))):
            raise ShaketableError(f"multipliers name layer {stray[0]}, which layers={join_layers(self.layers)} leaves out")

    @property
    def is_steady(self) -> bool:
        """Whether every layer has the same σ at every step."""
        return self.schedule.steady and not self.zones

    def groups(self, count: int) -> list[Group]:
        """The layers of a model with `count` layers, by their σ."""
        asked = [*(self.layers or ()), *self.multipliers]
        if count == 0 and (asked or self.zones or self.form == "output"):
            raise NoMatchError("AQN on chosen layers, or on the outputs of layers: this model has no decoder layers")
        if asked and max(asked) >= count:
            raise NoMatchError(f"layer {max(asked)} is out of range; this model has layers 0-{count - 1}")
        whole = self.layers is None and self.form == "weight"
        found: dict[tuple[float, bool], list[int]] = {(1.0, False): []} if whole else {}
        edge = math.ceil(EDGE * count)
        for layer in range(count) if self.layers is None else self.layers:
            middle = self.zones and edge <= layer < count - edge
            found.setdefault((self.multipliers.get(layer, 1.0), middle), []).append(layer)
        if self.zones and not any(middle for _, middle in found):
            raise NoMatchError(f"zones: none of these layers of a model with {count} is a middle one")
        groups = []
        for (multiplier, middle), layers in found.items():
            outside = whole and (multiplier, middle) == (1.0, False)
            if multiplier and (layers or outside):
                groups.append(Group(_label(layers, outside, count), tuple(layers), multiplier, middle, outside))
        if not groups:
            raise NoMatchError("every layer has the multiplier 0: there would be no noise")
        return groups

    def sigma(self, group: Group, step: int, total_steps: int, base: float | None = None) -> float:
        """σ of a group's layers at a step; `base` replaces the schedule's."""
        zone = MIDDLE if group.middle and step >= AFTER * total_steps else 1.0
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
        usual = AQN(self.schedule)
        given = {key: getattr(self, key) for key in KEYS}
        parts = [f"{key}={_shown(key, value)}" for key, value in given.items() if value != getattr(usual, key)]
        return ",".join([self.schedule.text(), *parts])

    @classmethod
    def load(cls, source: str | Path | AQN) -> AQN:
        """AQN from a line such as `global_decay:0.05-0.0005,stages=10`, or from a YAML file of `shaketable guide`."""
        if isinstance(source, AQN):
            return source
        if isinstance(source, Path) or re.search(r"\.ya?ml$", source.strip()):
            return _from_file(source if isinstance(source, Path) else Path(source.strip()))
        return _parse(source)


def _layers(given: Any) -> tuple[int, ...] | None:
    if given is None or given == "all":
        return None
    found = parse_layers(given) if isinstance(given, str) else tuple(sorted(set(given)))
    if not found or not all(isinstance(layer, int) and layer >= 0 for layer in found):
        raise ShaketableError(f"layers {given!r} are not indices from 0 on; leave them out for all")
    return found


def _label(layers: Sequence[int], outside: bool, count: int) -> str:
    if len(layers) == count:
        return "all layers" if count else "the whole model"
    names = f"{'layer' if len(layers) == 1 else 'layers'} {join_layers(tuple(layers))}" if layers else ""
    return " and ".join(part for part in (names, "outside of layers" if outside else "") if part)


# ---- one line of text


KEYS = tuple(f.name for f in fields(AQN) if f.name != "schedule")
COUNTS = {"global_decay": ("stages",), "epoch_aware": ("epochs",)}
"""Keys of a schedule's own."""
EXAMPLES = {
    "global_decay": "global_decay:0.05-0.0005,stages=10",
    "linear_decay": "linear_decay:0.05-0.0005",
    "epoch_aware": "epoch_aware:0.05-0.01+0.01-0.0005",
    "constant": "constant:0.01",
}
_NUMBER = r"\d*\.?\d+(?:[eE][+-]?\d+)?|\d+\."
_PLUS = r"(?<![eE])\+"
"""Between two parts, and not in 1e+3."""


def _parse(line: str) -> AQN:
    """AQN from a line of text."""
    head, *parts = line.strip().split(",")
    kind, _, sigmas = (part.strip() for part in head.partition(":"))
    check_word("schedule", kind, EXAMPLES)
    given: dict[str, Any] = {}
    for part in parts:
        key, _, text = (word.strip() for word in part.partition("="))
        if not key or not text or key in given:
            raise ShaketableError(f"{part.strip()!r} in {line.strip()!r} is not key=value, each key once")
        check_word(f"key for {kind}", key, (*COUNTS.get(kind, ()), *KEYS))
        given[key] = _READ.get(key, str)(text)
    count = given.pop("stages", given.pop("epochs", None))
    return AQN(_schedule(kind, sigmas, count), **given)


def _schedule(kind: str, sigmas: str, count: int | None) -> Schedule:
    """A schedule from its σ, and its number of stages or epochs."""
    if kind == "constant" and re.fullmatch(_NUMBER, sigmas):
        return Constant(float(sigmas))
    matches = [re.fullmatch(rf"({_NUMBER})-({_NUMBER})", text) for text in re.split(_PLUS, sigmas)]
    decays = [(float(match[1]), float(match[2])) for match in matches if match]
    if kind == "constant" or len(decays) < len(matches) or (len(decays) > 1 and (kind != "epoch_aware" or count is not None)):
        raise ShaketableError(f"{sigmas!r} are not the σ of {kind}; write e.g. {EXAMPLES[kind]}")
    if kind == "epoch_aware":
        return EpochAware(decays) if count is None else EpochAware.between(*decays[0], count)
    if kind == "linear_decay":
        return LinearDecay(*decays[0])
    return GlobalDecay(*decays[0]) if count is None else GlobalDecay(*decays[0], count)


def _shown(key: str, value: Any) -> str:
    if key == "layers":
        return join_layers(value)
    if key == "zones":
        return ZONES
    if isinstance(value, Mapping):
        return "+".join(f"{k}:{number(v)}" for k, v in value.items())
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,20}", text):
        raise ShaketableError(f"{text!r} is not a whole number")
    return int(text)


def _multipliers(text: str) -> dict[int, float]:
    """`0:2+27:0.5`"""
    found: dict[int, float] = {}
    for part in re.split(_PLUS, text):
        match = re.fullmatch(rf"\s*(\d+)\s*:\s*({_NUMBER})\s*", part)
        if not match or int(match[1]) in found:
            raise ShaketableError(f"{part.strip()!r} in {text!r} is not LAYER:FACTOR, each once; write e.g. 0:2+27:0.5")
        found[int(match[1])] = float(match[2])
    return found


_READ: dict[str, Any] = {
    "roles": lambda text: tuple(part.strip() for part in text.split("+")),
    "multipliers": _multipliers,
    "zones": lambda text: True if text in ("on", ZONES) else text,
    "seed": _whole,
    "stages": _whole,
    "epochs": _whole,
}


# ---- files


GUIDED = ("enabled", "layer_specific", "base_sigma", "layers", "layer_sigmas", "high_priority_layers", "schedule")
"""Keys of a guided file's `aqn`; those of `AQN` that guidance leaves open may stand beside them."""
OPEN = ("unit", "form", "roles", "zones", "where", "order", "seed")


def _from_file(path: Path) -> AQN:
    data = read_yaml(path, "the AQN file")
    if not isinstance(data, Mapping) or "aqn" not in data:
        raise ShaketableError(f"the AQN file {path} is not one of `shaketable guide`; other noise is a line of text")
    return from_guidance(data, str(path))


def from_guidance(data: Mapping[Any, Any], path: str) -> AQN:
    """AQN from what `shaketable guide`, or the origin's own script, writes, as data; `path` is how an error calls it."""
    for key in data:
        check_word(f"key in {path}", str(key), ("aqn", "metadata", "srdd_metadata"))
    body = data["aqn"]
    if not isinstance(body, Mapping):
        raise ShaketableError(f"{path}: aqn must hold a mapping, not {type(body).__name__}")
    for key in body:
        check_word(f"key in aqn of {path}", str(key), GUIDED + OPEN)
    if body.get("enabled") is not True or body.get("layer_specific") is not True:
        raise ShaketableError(f"{path}: enabled and layer_specific must be true; train without the file instead")
    base: Any = body.get("base_sigma")
    sigmas = body.get("layer_sigmas")
    check_size(f"{path}: base_sigma", base, above=0.0)
    if not isinstance(sigmas, Mapping) or not sigmas or not all(isinstance(layer, int) for layer in sigmas):
        raise ShaketableError(f"{path}: layer_sigmas must be a mapping of layers to σ, such as {{15: 0.1}}")
    for layer, sigma in sigmas.items():
        check_size(f"{path}: layer_sigmas: {layer}", sigma)
    named, more = _layers(body.get("layers")), {str(key): body[key] for key in OPEN if key in body}
    if named is None and "srdd_metadata" in data:
        count = data["srdd_metadata"].get("num_layers") if isinstance(data["srdd_metadata"], Mapping) else None
        if not isinstance(count, int) or not 1 <= count <= 10**6:
            raise ShaketableError(f"srdd_metadata of {path}: num_layers is {count!r}; write the number of decoder layers")
        named = tuple(range(count))
        more = {"form": "output", "where": "both"} | more
    elif named is None:
        named = tuple(sorted(sigmas))
    if stray := sorted(set(sigmas) - set(named)):
        raise ShaketableError(f"{path}: layer_sigmas name layer {stray[0]}, which is none of its layers {join_layers(named)}")
    factors = {layer: float(f"{sigmas[layer] / base:.12g}") for layer in sorted(sigmas)}
    schedule = str(body.get("schedule", "epoch_aware"))
    return AQN(
        like_the_origin(schedule, base) if schedule in NAMED else _parse(schedule).schedule,
        layers=named,
        multipliers={layer: factor for layer, factor in factors.items() if factor != 1},
        **more,
    )

"""Configs of the study that this project re-implements, as a plan and an AQN. Imports neither torch nor verl.

    found = translate(OmegaConf.to_container(config, resolve=True), os.environ)
    print(*found.lines, sep="\\n")        # trainer.noisy_ops → relative_gaussian:0.05@op.matmul,phase=rollout+train
    found.plan, found.aqn                # or None

That study patched verl and gave it five groups of keys: `trainer.hw_error_injection`, `trainer.noisy_ops` (`VERL_NOISY_OPS_*`
in the environment), `deadzone`, `trainer.noise_injection` and `aqn`. Each is a model here, whose `meaning` is what it becomes.
docs/origin-configs.md has the table, and says where a translation differs from a replay.

Every value is checked, in a group that is off too, and every error has the key's full dotted name: the origin's runs were lost
to keys that were accepted and did nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, field_validator

from shaketable.aqn.schedules import AnySchedule, Constant, EpochAware, GlobalDecay, LinearDecay
from shaketable.aqn.spec import AQN, NORMS, ROLES, from_guidance
from shaketable.errors import ShaketableError, nearest
from shaketable.io.yaml_file import read_yaml
from shaketable.layer_ranges import join_layers
from shaketable.plan import Plan

GROUPS = ("trainer.hw_error_injection", "trainer.noisy_ops", "trainer.noise_injection", "deadzone", "aqn")
FLAT = ("deadzone", "aqn")
"""Groups whose keys the documents also write flat, as `deadzone_layer`."""
VARIABLES = {
    "VERL_NOISY_OPS_ENABLED": "enabled",
    "VERL_NOISY_OPS_SCALE": "error_scale",
    "VERL_NOISY_OPS_TYPE": "error_type",
    "VERL_NOISY_OPS_ALL_OPS": "all_ops_mode",
    "VERL_NOISY_OPS_FORWARD_ONLY": "forward_only",
    "VERL_NOISY_OPS_BACKWARD_ONLY": "backward_only",
    "VERL_NOISY_OPS_TRAINING_ONLY": "training_only",
}
SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
LEFT_OUT = ("lm_head", "embed_tokens", "lora_A", "lora_B", "lora_", "base_layer")
"""Modules that plans and AQN leave out by themselves: excluding them changes nothing."""
FORMATS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8_e4m3"}
POINTS = {"input": "input", "output": "output", "weight": "weight", "both": "weight+input"}
PHASES = {"rollout": "rollout", "training": "train", "both": "rollout+train"}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    **{name: (name,) for name in ("rmsnorm", "linear", *FUSED, *SPLIT, *NORMS)},
    "rmsnorm_down_proj": ("rmsnorm", "down_proj"),
    "all": ("rmsnorm", "linear"),
}


@dataclass(frozen=True)
class Translation:
    """The plan and the AQN of an origin config."""

    plan: Plan | None = None
    """The faults; None without any."""
    aqn: AQN | None = None
    """The noise in the sampler; None without any."""
    lines: tuple[str, ...] = ()
    """One line per group of keys that was found, to print at the start: what it became, or that it is off."""


def translate(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Translation:
    """The plan and the AQN of a verl config with the origin's keys; empty when it has none, or all are off.

    Args:
        config: The whole config as plain nested mappings, lists and values.
        environ: The environment, for `VERL_NOISY_OPS_*`; none by default.

    Raises:
        ShaketableError: A key is unknown or cannot be honoured, two AQNs are on, or config and environment disagree.
    """
    config = grouped(config)
    # Noise comes before the dead zone: it may lift a signal over the threshold, the effect that the origin looked for.
    found = [HardwareKeys.found_in(config), _operators(config, environ or {}), DeadZoneKeys.found_in(config)]
    found += [WeightNoiseKeys.found_in(config), OutputNoiseKeys.found_in(config)]
    groups = [group for group in found if group is not None]
    clauses = tuple(clause for group in groups if group.plan for clause in group.plan.clauses)
    noises = [group for group in groups if group.aqn]
    if len(noises) > 1:
        names = " and ".join(group.name for group in noises)
        raise ShaketableError(f"{names} are both on; a run has one AQN: set enabled: false in one of them")
    aqn = noises[0].aqn if noises else None
    return Translation(Plan(clauses=clauses) if clauses else None, aqn, tuple(group.line for group in groups))


@dataclass(frozen=True)
class Found:
    """The translation of one group: part of a plan, an AQN, or nothing when it is off."""

    name: str
    note: str = "off"
    plan: Plan | None = None
    aqn: AQN | None = None

    @property
    def line(self) -> str:
        """The group, what it became, and what else there is to say."""
        if (became := self.plan or self.aqn) is None:
            return f"{self.name} → {self.note}"
        return f"{self.name} → {became.text()}" + (f" ({self.note})" if self.note else "")


# ---- values


def as_number(value: object) -> float | None:
    """A finite number, also one that is text (YAML reads `1e-4` as text); None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _number(value: object) -> float:
    if (number := as_number(value)) is None:
        raise ValueError("write a number")
    return number


def _layers(value: object) -> tuple[int, ...] | None:
    """A layer or a list of them; None for all."""
    if value == "all":
        return None
    several = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    numbers = [as_number(layer) for layer in several]
    found = tuple(sorted({int(n) for n in numbers if n is not None and 0 <= n < 10**6 and n == int(n)}))
    if not found or len(found) < len(set(numbers)):
        raise ValueError("write a list of layer indices such as [14, 15], or 'all'")
    return found


def _names(value: object) -> list[str]:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(name, str) for name in several):
        raise ValueError("write a name or a list of names")
    return list(dict.fromkeys(several))


Size = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Whole = Annotated[int, BeforeValidator(_number)]
Names = Annotated[list[str], BeforeValidator(_names)]
Layers = Annotated[tuple[int, ...] | None, BeforeValidator(_layers)]
Scope = Literal["token", "block", "tensor"]


class Keys(BaseModel):
    """The keys of one group; null is a key that is not there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str]

    enabled: StrictBool = False

    @classmethod
    def found_in(cls, config: Mapping[str, Any]) -> Found | None:
        """The translation of this group of a config; None when there is none."""
        found: Any = config
        for part in cls.name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            return None
        keys = cls.read(found)
        return keys.meaning(config) if keys.is_on else Found(cls.name)

    @classmethod
    def read(cls, found: object) -> Self:
        """The keys of a mapping.

        Raises:
            ShaketableError: A key is unknown, or its value is not accepted.
        """
        if not isinstance(found, Mapping):
            raise ShaketableError(f"{cls.name} is {shown(found)}; it must be a mapping with {', '.join(cls.model_fields)}")
        try:
            return cls(**{str(key): value for key, value in found.items() if value is not None})
        except ValidationError as error:
            first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
            key, given = str(first["loc"][0]), first["input"]
            if first["type"] == "extra_forbidden":
                raise ShaketableError(f"{cls.name}.{key}: unknown key; {nearest(key, cls.model_fields, shown=20)}") from None
            accepted = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
            if first["type"] == "literal_error":
                accepted = nearest(str(given), re.findall(r"'(.*?)'", first["ctx"]["expected"]))
            raise ShaketableError(f"{cls.written(key)} is {shown(given)}; {accepted}") from None

    @classmethod
    def written(cls, key: str) -> str:
        """The full name of a key in an error."""
        return f"{cls.name}.{key}"

    @property
    def is_on(self) -> bool:
        """`enabled`, which a group with any other key must have: the parameters of a test alone are neither on nor off."""
        if self.model_fields_set and "enabled" not in self.model_fields_set:
            first = next(key for key in type(self).model_fields if key in self.model_fields_set)
            what = f"{self.name} has {first} and no enabled"
            raise ShaketableError(f"{what}, so it is neither on nor off; add +{self.name}.enabled=True")
        return self.enabled

    def meaning(self, config: Mapping[str, Any]) -> Found:
        """The translation of keys that are on."""
        raise NotImplementedError

    def problem(self, key: str, accepted: str) -> ShaketableError:
        """The error of a key: its full name, what was found, what is accepted."""
        return ShaketableError(f"{self.name}.{key} is {shown(getattr(self, key))}; {accepted}")

    def check_names(self, key: str, valid: Collection[str]) -> None:
        """Refuse a list with a name that is not valid."""
        if unknown := next((name for name in getattr(self, key) if name not in valid), None):
            raise ShaketableError(f"{self.name}.{key} is {unknown!r}; {nearest(unknown, valid, shown=30)}")

    def needed(self, key: str) -> Any:
        """The value of a key that has no default."""
        if key not in self.model_fields_set:
            raise ShaketableError(f"{self.name}.{key} is missing; {self.name} needs it")
        return getattr(self, key)


def shown(value: object) -> str:
    """A value in an error line, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors of a plan or an AQN begin with the group that it was made from."""
    try:
        yield
    except ShaketableError as error:
        raise ShaketableError(f"{name}: {error}") from None


# ---- faults: in rollouts and training. The origin's were on in validations too, so its final accuracies were noisy


class DeadZoneKeys(Keys):
    """Small values of what decoder layers return are zeroed."""

    name = "deadzone"

    layer: Layers = None
    threshold: Share = 0.01
    sparsity: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 1.0
    scope: Scope = "token"

    def meaning(self, config: Mapping[str, Any]) -> Found:
        """A dead zone in rollouts and training."""
        part = "" if self.sparsity == 1 else f",sparsity={self.sparsity!r}"
        return _dead_zone(self, "threshold", self.needed("layer"), part, "phase=rollout+train")


class HardwareKeys(Keys):
    """Errors on modules, or a dead zone on decoder layers."""

    name = "trainer.hw_error_injection"

    error_scale: Size = 1e-5
    error_type: Literal["relative_gaussian", "absolute_gaussian", "systematic_bias", "deadzone", "mxfp4", "nvfp4", "fp8"] = (
        "relative_gaussian"
    )
    injection_point: Literal["input", "output", "weight", "both"] = "input"
    apply_during: Literal["rollout", "training", "both"] = "rollout"
    target_modules: Names = []
    target_layers: Layers = None
    exclude_modules: Names = []
    use_ste: StrictBool = True
    deadzone_threshold: Share = 0.01
    scope: Scope = "token"

    def meaning(self, config: Mapping[str, Any]) -> Found:
        """A clause on modules or layers."""
        if not self.use_ste:
            raise self.problem("use_ste", "formats are straight-through: leave it out, or write true")
        self.check_names("target_modules", TARGETS)
        phase, point = PHASES[self.apply_during], POINTS[self.injection_point]
        if self.error_type == "deadzone":
            self._check_excluded(LEFT_OUT, ())
            if point not in ("input", "output"):
                raise self.problem("injection_point", "a deadzone acts on decoder layers; write input or output")
            ignored = "; target_modules is not used by deadzone" if self.target_modules else ""
            return _dead_zone(self, "deadzone_threshold", self.target_layers, "", f"point={point},phase={phase}", ignored)
        if self.error_scale == 0 and self.error_type not in FORMATS:
            return Found(self.name, "off: error_scale is 0")
        names, note = self._targets()
        inside = "" if self.target_layers is None else f",layers={join_layers(self.target_layers)}"
        fault = FORMATS.get(self.error_type) or f"{self.error_type}:{self.error_scale!r}"
        return _clause(self.name, f"{fault}@module.{'+'.join(names)},point={point}{inside},phase={phase}", note)

    def _targets(self) -> tuple[tuple[str, ...], str]:
        named = tuple(dict.fromkeys(name for word in self.target_modules or ["rmsnorm"] for name in TARGETS[word]))
        names = tuple(name for name in named if name not in self.exclude_modules)
        if not names:
            raise self.problem("exclude_modules", f"it takes away all of target_modules, {', '.join(named)}")
        self._check_excluded((*LEFT_OUT, *named), names)
        if self.error_type in FORMATS and names == ("rmsnorm",):
            note = f"{self.error_type} acts on linears where target_modules names none, as in the origin; lm_head is left out"
            return ("linear",), note
        return names, "lm_head is left out" if "linear" in names else ""

    def _check_excluded(self, same: tuple[str, ...], names: tuple[str, ...]) -> None:
        """Refuse to exclude what plans do not leave out anyway, and say what to write instead."""
        if set(self.exclude_modules) <= {*same}:
            return
        instead = "a plan names what it hits: list the wanted layers in target_layers instead"
        if "linear" in names and not {*FUSED, *SPLIT}.isdisjoint(self.exclude_modules):
            whole = FUSED if self.apply_during == "rollout" else SPLIT
            kept = [name for name in (*names, *whole) if name != "linear" and name not in self.exclude_modules]
            instead = f"a plan names what it hits: +{self.name}.target_modules=[{','.join(kept)}] without exclude_modules"
        raise self.problem("exclude_modules", f"{instead}; also accepted: {', '.join(same)}")


class OperatorKeys(Keys):
    """Errors on products, or on all operators."""

    name = "trainer.noisy_ops"

    error_scale: Size | None = None
    error_type: Literal["relative_gaussian", "absolute_gaussian", "systematic_bias"] = "relative_gaussian"
    all_ops_mode: StrictBool = False

    @field_validator("error_type", mode="before")
    @classmethod
    def _is_no_dead_zone(cls, value: object) -> object:
        if value == "deadzone":
            group = "+deadzone.enabled=true +deadzone.layer=15 +deadzone.threshold=0.01"
            raise ValueError(f"a dead zone has a group of its own: {group}")
        return value


class OperatorVariables(OperatorKeys):
    """The same from the environment, which has more of them."""

    forward_only: StrictBool = False
    backward_only: StrictBool = False
    training_only: StrictBool = False

    @classmethod
    def written(cls, key: str) -> str:
        """The name of a variable."""
        return next(name for name, field in VARIABLES.items() if field == key)

    def clause(self, name: str) -> Found:
        """A clause on operators."""
        if self.error_scale is None:
            scale = f"{self.name}.error_scale, or VERL_NOISY_OPS_SCALE, is missing"
            raise ShaketableError(f"{scale}; without it the origin took 1e-5 in one process and 1e-4 in another")
        if self.error_scale == 0:
            return Found(name, "off: the scale is 0")
        if self.forward_only and self.backward_only:
            both = "VERL_NOISY_OPS_FORWARD_ONLY and VERL_NOISY_OPS_BACKWARD_ONLY are both on"
            raise ShaketableError(f"{both}; set one of them, or neither for errors both ways")
        way = ",direction=forward" if self.forward_only else ",direction=backward" if self.backward_only else ""
        phase = "train" if self.training_only or self.backward_only else "rollout+train"
        note = "a sampler has no backward" if self.backward_only else "not in validation, where the origin had it too"
        family = "all" if self.all_ops_mode else "matmul"
        return _clause(name, f"{self.error_type}:{self.error_scale!r}@op.{family}{way},phase={phase}", note)


def _operators(config: Mapping[str, Any], environ: Mapping[str, str]) -> Found | None:
    """`trainer.noisy_ops` and `VERL_NOISY_OPS_*`. One reached the origin's driver, the other its workers: they must agree."""
    trainer = config.get("trainer")
    group = trainer.get("noisy_ops") if isinstance(trainer, Mapping) else None
    asked = {name: text.strip() for name, text in environ.items() if name.startswith("VERL_NOISY_OPS_") and text.strip()}
    if group is None and not asked:
        return None
    if unknown := next((name for name in asked if name not in VARIABLES), None):
        raise ShaketableError(f"{unknown}: unknown variable; {nearest(unknown, VARIABLES)}")
    texts = {VARIABLES[name]: text for name, text in asked.items()}
    switched = {field: SWITCH.get(text.lower(), text) for field, text in texts.items() if field[:6] != "error_"}
    given = OperatorVariables.read(texts | switched).model_dump(exclude_unset=True)
    own = OperatorKeys.read(group or {}).model_dump(exclude_unset=True)
    for field, value in given.items() if own.get("enabled") or given.get("enabled") else ():
        if own.get(field, value) != value:
            both = f"{OperatorKeys.written(field)} is {own[field]!r} and {OperatorVariables.written(field)} is {value!r}"
            raise ShaketableError(f"{both}; make them agree, or drop one of them")
    keys = OperatorVariables(**given | own)
    if given and "enabled" not in keys.model_fields_set:
        on = "VERL_NOISY_OPS_ENABLED"
        raise ShaketableError(f"{next(iter(asked))} is set and {on} is not; set {on}=1, or unset {next(iter(asked))}")
    name = " and ".join([OperatorKeys.name] * (group is not None) + ["VERL_NOISY_OPS_*"] * bool(given))
    return keys.clause(name) if keys.is_on else Found(name)


def _dead_zone(
    keys: DeadZoneKeys | HardwareKeys, threshold: str, layers: tuple[int, ...] | None, part: str, where: str, more: str = ""
) -> Found:
    """The maximum is per token: 0.01 of a whole tensor's zeroes 99.9 % of a middle layer, and nothing is learnt from that."""
    value: float = getattr(keys, threshold)
    if value == 0:
        return Found(keys.name, f"off: {threshold} is 0")
    differs = f"the maximum is per {keys.scope}; the origin took the whole tensor's, and {keys.name}.scope=tensor does"
    note = "the maximum is over the whole tensor, as in the origin" if keys.scope == "tensor" else differs
    place = "all" if layers is None else join_layers(layers)
    return _clause(keys.name, f"dead_zone:{value!r},scope={keys.scope}{part}@layer.{place},{where}", note + more)


def _clause(name: str, text: str, note: str) -> Found:
    with _naming(name):
        return Found(name, note, plan=Plan.parse(text))


# ---- AQN


class WeightNoiseKeys(Keys):
    """QeRL's noise w + z·σ on the weights of norms while the policy samples. Its σ is absolute, against our default."""

    name = "trainer.noise_injection"

    sigma_start: Size = 0.05
    sigma_end: Annotated[float, BeforeValidator(_number), Field(gt=0)] = 0.0005
    num_stages: Annotated[Whole, Field(ge=3, le=10**6)] = 10
    epoch_aware: StrictBool = False
    stages_per_epoch: Any = None
    target_modules: Names = []
    exclude_patterns: Names = []
    layer_types: Names = []
    layer_sigma_config: Any = None

    def meaning(self, config: Mapping[str, Any]) -> Found:
        """AQN on the weights of norms."""
        if self.sigma_start == 0:
            return Found(self.name, "off: sigma_start is 0")
        if self.sigma_end > self.sigma_start:
            raise self.problem("sigma_end", f"a decay ends at or below sigma_start, which is {self.sigma_start:g}")
        roles = self._roles()
        default, layers, multipliers = self._layer_factors()
        start, end = _short(self.sigma_start * default), _short(self.sigma_end * default)
        with _naming(self.name):
            kind = "epoch_aware" if self.epoch_aware else "global_decay"
            schedule, note = _schedule(kind, start, end, self.num_stages, config)
            aqn = AQN(schedule, unit="absolute", roles=roles, layers=layers, multipliers=multipliers)
        unused = [key for key in ("num_stages", "stages_per_epoch") if self.epoch_aware and key in self.model_fields_set]
        smooth = f"{' and '.join(unused)} not used: σ falls smoothly within an epoch and none of it is silent" if unused else ""
        return Found(self.name, "; ".join(part for part in (smooth, note) if part), aqn=aqn)

    def _roles(self) -> tuple[str, ...]:
        """The modules whose weights get noise: the norms that `target_modules` names, or all of `layer_types`."""
        self.check_names("target_modules", ("rmsnorm", "norm", *NORMS))
        self.check_names("exclude_patterns", (*LEFT_OUT, *NORMS))
        self.check_names("layer_types", ROLES)
        named = [name for name in self.target_modules if name in NORMS]
        kept = tuple(name for name in named or NORMS if name not in self.exclude_patterns)
        if not named and len(kept) < len(NORMS):
            rest = f"+{self.name}.target_modules=[{','.join(kept)}]"
            raise self.problem("exclude_patterns", f"name the norms that are wanted: {rest}")
        if not named:
            return tuple(self.layer_types) or ("rmsnorm",)
        if not kept or len(named) < len(self.target_modules) or self.layer_types:
            raise self.problem("target_modules", f"write either norms by name ({', '.join(NORMS)}), or leave it empty for all")
        return kept

    def _layer_factors(self) -> tuple[float, tuple[int, ...] | None, dict[int, float]]:
        """Factor of the layers that are not named, the layers with noise (None is all), and factors beside that one."""
        name, data = LayerKeys.name, self.layer_sigma_config
        if isinstance(data, str | Path):
            data = read_yaml(Path(data), name)
        if data is None or data == {}:
            return 1.0, None, {}
        if isinstance(data, Mapping) and "aqn" in data:
            with _naming(name):
                guided = from_guidance(data, "the guidance")
            return 1.0, guided.layers, guided.multipliers
        if isinstance(data, Mapping) and all(as_number(layer) is not None for layer in data):
            return 1.0, None, _beside({layer: own / self.sigma_start for layer, own in _factors(data, name).items()})
        return LayerKeys.read(data).factors()


class LayerKeys(Keys):
    """σ of single layers, which never reached the origin's sampler: here it is part of the one AQN. On when it is there."""

    name = "trainer.noise_injection.layer_sigma_config"

    enabled: StrictBool = True
    default_multiplier: Size = 1.0
    layer_multipliers: Any = {}
    zone_schedule: Any = {"enabled": False}

    def factors(self) -> tuple[float, tuple[int, ...] | None, dict[int, float]]:
        """As `WeightNoiseKeys._layer_factors`."""
        if not self.enabled:
            return 1.0, None, {}
        if not isinstance(self.zone_schedule, Mapping) or self.zone_schedule.get("enabled") is not False:
            raise self.problem("zone_schedule", "use AQN's own zones instead, e.g. +shaketable.aqn='global_decay:…,zones=on'")
        default = self.default_multiplier
        factors = _factors(self.layer_multipliers, f"{self.name}.layer_multipliers")
        if default > 0:
            return default, None, _beside({layer: factor / default for layer, factor in factors.items()})
        layers = tuple(layer for layer, factor in factors.items() if factor > 0)
        if not layers:
            raise self.problem("default_multiplier", "no layer of layer_multipliers is above 0, so there would be no noise")
        return 1.0, layers, _beside({layer: factors[layer] for layer in layers})


class OutputNoiseKeys(Keys):
    """The guided experiments' noise y + z·σ·|y| on what decoder layers return, in rollouts and in training."""

    name = "aqn"

    target_layers: Layers = None
    sigma: Size | None = None
    schedule: Literal["epoch_aware", "global_decay", "linear_decay", "constant"] = "epoch_aware"
    where: Literal["both", "rollout"] = "both"
    config: Any = None
    """A file that `AQN.load` reads; it means here what it means everywhere."""
    layer_specific: StrictBool = False
    base_sigma: Size | None = None
    layers: Layers = None
    layer_sigmas: Any = None
    high_priority_layers: Any = None

    @property
    def is_on(self) -> bool:
        """A file is on unless `enabled` says otherwise."""
        return (self.enabled or "enabled" not in self.model_fields_set) if self.config is not None else super().is_on

    def meaning(self, config: Mapping[str, Any]) -> Found:
        """AQN on outputs; σ falls by 100 over the run."""
        if self.config is not None:
            return self._from_file(config)
        sigma, multipliers, unused = self._layer_sigmas()
        if sigma == 0:
            return Found(self.name, "off: sigma is 0")
        with _naming(self.name):
            schedule, note = _schedule(self.schedule, sigma, sigma / 100, 10, config)
            layers = self.layers if "layers" in self.model_fields_set else self.target_layers
            aqn = AQN(schedule, form="output", layers=layers, multipliers=multipliers, where=self.where)
        fall = "" if self.schedule == "constant" else "σ falls by 100 in all, as the origin's did"
        high = "high_priority_layers not used: σ of each layer is in layer_sigmas" if self.high_priority_layers else ""
        return Found(self.name, "; ".join(part for part in (fall, note, unused, high) if part), aqn=aqn)

    def _from_file(self, config: Mapping[str, Any]) -> Found:
        """The AQN of a file, with another schedule where one is given, as `--aqn_schedule` did."""
        if other := next(iter(self.model_fields_set - {"config", "schedule", "enabled"}), None):
            raise self.problem(other, f"the file of {self.name}.config says it; write it there")
        with _naming(f"{self.name}.config"):
            aqn, note = AQN.load(Path(str(self.config))), ""
            if "schedule" in self.model_fields_set:
                peak = aqn.schedule.peak()
                schedule, note = _schedule(self.schedule, peak, peak / 100, 10, config)
                aqn = aqn.model_copy(update={"schedule": schedule})
        return Found(self.name, note, aqn=aqn)

    def _layer_sigmas(self) -> tuple[float, dict[int, float], str]:
        """σ of a layer that has none of its own, the factors of the others, and what was not used."""
        if self.sigma is not None and self.base_sigma is not None and self.sigma != self.base_sigma:
            raise self.problem("sigma", f"and base_sigma is {self.base_sigma:g}; write one of them")
        sigma: float = self.needed("sigma") if self.base_sigma is None else self.base_sigma
        if self.layer_sigmas is None and self.layer_specific:
            raise self.problem("layer_sigmas", "layer_specific needs it: a mapping of layers to σ such as {15: 0.1}")
        if self.layer_sigmas is None:
            return sigma, {}, ""
        if "layer_specific" not in self.model_fields_set:
            raise self.problem("layer_sigmas", f"it is used with +{self.name}.layer_specific=true, and that is not there")
        if not self.layer_specific:
            return sigma, {}, "layer_sigmas not used: layer_specific is false"
        factors = _factors(self.layer_sigmas, f"{self.name}.layer_sigmas")
        if sigma == 0:
            raise self.problem("base_sigma", "it is what layer_sigmas are measured by: write a number above 0")
        return sigma, _beside({layer: own / sigma for layer, own in factors.items()}), ""


def _schedule(kind: str, start: float, end: float, stages: int, config: Mapping[str, Any]) -> tuple[AnySchedule, str]:
    if kind == "constant":
        return Constant(start), ""
    if kind == "global_decay":
        return GlobalDecay(start, end, stages), ""
    if kind == "linear_decay":
        return LinearDecay(start, end), ""
    epochs, note = _epochs(config)
    if epochs == 2 and _short(start / 100) == _short(end):  # the documents' own boundary
        return EpochAware([(_short(a), _short(b)) for a, b in ((start, start / 5), (start / 5, end))]), note
    exact = EpochAware.between(start, end, epochs)
    even = "epochs in geometric progression: the documents have boundaries for two epochs and a fall by 100 only"
    note = "; ".join(part for part in (even, note) if part)
    return EpochAware([(_short(first), _short(last)) for first, last in exact.epochs]), note


def _epochs(config: Mapping[str, Any]) -> tuple[int, str]:
    """The number of epochs, which the trainer's own keys have."""
    trainer = config.get("trainer")
    own = trainer if isinstance(trainer, Mapping) else {}
    if (given := own.get("total_epochs")) is None:
        raise ShaketableError("trainer.total_epochs is missing; an epoch-aware schedule needs the number of epochs")
    epochs = as_number(given)
    if epochs is None or not 1 <= epochs <= 1000 or epochs != int(epochs):
        raise ShaketableError(f"trainer.total_epochs is {shown(given)}; write a whole number from 1 to 1000")
    if own.get("total_training_steps") is None:
        return int(epochs), ""
    cut = "an epoch is a pass through the data; where trainer.total_training_steps ends the run, the rest is left out"
    return int(epochs), cut


def _factors(data: object, name: str) -> dict[int, float]:
    """Layer to number; layers may be text, for JSON has no other keys."""
    if not isinstance(data, Mapping):
        raise ShaketableError(f"{name} is {data!r}; write a mapping of layers to numbers such as {{14: 1.5}}")
    found: dict[int, float] = {}
    for key, value in data.items():
        layer, number = as_number(key), as_number(value)
        if layer is None or not 0 <= layer < 10**6 or layer != int(layer) or int(layer) in found:
            raise ShaketableError(f"{name}.{key}: not the index of a layer, or given twice; write e.g. {{14: 1.5}}")
        if number is None or number < 0:
            raise ShaketableError(f"{name}.{key} is {shown(value)}; write a number of 0 or more")
        found[int(layer)] = number
    return dict(sorted(found.items()))


def _beside(factors: Mapping[int, float]) -> dict[int, float]:
    """Factors as they are written down: without rounding's tail, and without those that are 1."""
    return {layer: _short(factor) for layer, factor in factors.items() if _short(factor) != 1}


def _short(value: float) -> float:
    return float(f"{value:.12g}")


# ---- spellings


def grouped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with flat keys (`deadzone_layer`) and dotted ones of YAML files in their groups; others are left alone.

    Raises:
        ShaketableError: A key is written in two spellings, or in `rollout`, where verl would fail in a worker.
    """
    model = config.get("actor_rollout_ref")
    rollout = model.get("rollout") if isinstance(model, Mapping) else None
    for key, value in rollout.items() if isinstance(rollout, Mapping) else ():
        if (full := dotted(str(key))) is not None:
            where = f"actor_rollout_ref.rollout.{key}"
            raise ShaketableError(f"{where}: verl's rollout has no such key; write +{full}={value} instead")
    whole = dict(config)
    for key in [str(key) for key in config]:
        if (full := dotted(key)) is not None:
            _put(whole, full, whole.pop(key), key)
    return whole


def dotted(key: str) -> str | None:
    """The key as a dotted path to or into one of the origin's groups; None where it is not the origin's, or has no dots."""
    group, _, rest = key.partition("_")
    full = f"{group}.{rest}" if group in FLAT and rest else key
    return full if "." in full and any(f"{full}.".startswith(f"{name}.") for name in GROUPS) else None


def _put(whole: dict[str, Any], path: str, value: Any, written: str) -> None:
    """Put a value at a dotted path; mappings on the way are copied, for they are the caller's."""
    *above, last = path.split(".")
    at = whole
    for part in above:
        inner = at.get(part)
        if inner is not None and not isinstance(inner, Mapping):
            raise ShaketableError(f"{written} is there and {part} is {inner!r}; write {path} alone")
        at[part] = dict(inner or {})
        at = at[part]
    if at.get(last) is not None:
        raise ShaketableError(f"{written} and {path} are the same key; write one of them")
    at[last] = value

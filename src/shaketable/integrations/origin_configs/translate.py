"""Configs of the study that this project re-implements, as a plan and an AQN. Imports neither torch nor verl.

That study patched verl and gave it five groups of keys. Each is a class here, with the keys that the study's documents use.
Unknown keys and values are errors, in a group that is off too: the study lost runs to keys that did nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from shaketable.aqn.schedules import Constant, EpochAware, GlobalDecay, Schedule
from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError, nearest
from shaketable.integrations.common.keys import read_keys
from shaketable.layer_ranges import join_layers
from shaketable.plan import Plan

FLAT = ("deadzone", "aqn")
"""Groups whose keys the documents also write flat, as `deadzone_layer`."""
VARIABLES = {
    "VERL_NOISY_OPS_ENABLED": "enabled",
    "VERL_NOISY_OPS_SCALE": "error_scale",
    "VERL_NOISY_OPS_TYPE": "error_type",
}
"""The keys of `trainer.noisy_ops` in the environment."""
PHASES = {"rollout": "rollout", "training": "train", "both": "rollout+train"}


@dataclass(frozen=True)
class Translation:
    """The plan and the AQN of an origin config; None without any."""

    plan: Plan | None = None
    aqn: AQN | None = None
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
    clauses: list[str] = []
    noises: dict[str, AQN] = {}
    lines = []
    for group in GROUPS:  # noise before the dead zone: it may lift a signal over the threshold, which the study looked for
        found = _group(config, group.name)
        if group is OperatorErrors:
            found = _with_variables(found, environ or {})
        if found is None:
            continue
        keys = read_keys(group, group.name, found)
        if not keys.is_on():
            lines.append(f"{group.name} → off")
            continue
        made = keys.meaning(config)
        if isinstance(made, AQN):
            noises[group.name] = made
        else:
            clauses.append(made)
        text = made.text() if isinstance(made, AQN) else made
        lines.append(f"{group.name} → {text}" + (f" ({group.note})" if group.note else ""))
    if len(noises) > 1:
        raise ShaketableError(f"{' and '.join(noises)} are both on; a run has one AQN: set enabled: false in one of them")
    return Translation(Plan.parse(";".join(clauses)) if clauses else None, next(iter(noises.values()), None), tuple(lines))


# ---- groups


def _layers(value: object) -> object:
    if value == "all":
        return None
    if isinstance(value, str):
        return value.split(",")
    return [value] if isinstance(value, int) else value


def _names(value: object) -> object:
    return [value] if isinstance(value, str) else value


Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Layers = Annotated[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None, BeforeValidator(_layers)]
Norms = Annotated[list[Literal["input_layernorm", "post_attention_layernorm"]], BeforeValidator(_names)]
Modules = Annotated[list[Literal["rmsnorm", "linear", "down_proj"]], BeforeValidator(_names)]
ErrorType = Literal["relative_gaussian", "absolute_gaussian", "systematic_bias"]


class Keys(BaseModel):
    """The keys of one group. Numbers may be text, as YAML reads `1e-4`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str]
    size: ClassVar[str]
    """The key with the magnitude; 0 is off."""
    note: ClassVar[str] = ""
    """How the translation differs from the original."""

    enabled: StrictBool = False

    def is_on(self) -> bool:
        """Whether it is enabled, and its magnitude is above 0."""
        if self.model_fields_set and "enabled" not in self.model_fields_set:
            first = next(key for key in type(self).model_fields if key in self.model_fields_set)
            what = f"{self.name} has {first} and no enabled"
            raise ShaketableError(f"{what}, so it is neither on nor off; add +{self.name}.enabled=True")
        return self.enabled and getattr(self, self.size) != 0

    def meaning(self, config: Mapping[str, Any]) -> str | AQN:
        """A clause of a plan, or an AQN."""
        raise NotImplementedError

    def needed(self, key: str) -> Any:
        """The value of a key that has no default."""
        if (value := getattr(self, key)) is None:
            raise ShaketableError(f"{self.name}.{key} is missing")
        return value


class ModuleErrors(Keys):
    """Errors at the inputs or outputs of modules."""

    name = "trainer.hw_error_injection"
    size = "error_scale"

    error_scale: Size = 1e-5
    error_type: ErrorType = "relative_gaussian"
    injection_point: Literal["input", "output"] = "input"
    apply_during: Literal["rollout", "training", "both"] = "rollout"
    target_modules: Modules = ["rmsnorm"]

    def meaning(self, config: Mapping[str, Any]) -> str:
        modules = "+".join(self.target_modules or ["rmsnorm"])
        where = f"module.{modules},point={self.injection_point},phase={PHASES[self.apply_during]}"
        return f"{self.error_type}:{self.error_scale!r}@{where}"


class OperatorErrors(Keys):
    """Errors on products, in rollouts and training."""

    name = "trainer.noisy_ops"
    size = "error_scale"
    note = "not in validation, where the origin had it too"

    error_scale: Size | None = None
    error_type: ErrorType = "relative_gaussian"

    def meaning(self, config: Mapping[str, Any]) -> str:
        return f"{self.error_type}:{self.needed('error_scale')!r}@op.matmul,phase=rollout+train"


class DeadZone(Keys):
    """Small values of what decoder layers return are zeroed, in rollouts and training."""

    name = "deadzone"
    size = "threshold"
    note = "the maximum is per token; the origin took the whole tensor's, which zeroes 99.9 % of a middle layer"

    layer: Layers = None
    threshold: Annotated[Size, Field(le=1)] = 0.01
    sparsity: Annotated[float, Field(gt=0, le=1)] = 1.0

    def meaning(self, config: Mapping[str, Any]) -> str:
        part = "" if self.sparsity == 1 else f",sparsity={self.sparsity!r}"
        return f"dead_zone:{self.threshold!r},scope=token{part}@layer.{join_layers(self.needed('layer'))},phase=rollout+train"


class WeightNoise(Keys):
    """QeRL's noise w + z·σ on the weights of norms while the policy samples. Its σ is absolute, against our default."""

    name = "trainer.noise_injection"
    size = "sigma_start"

    sigma_start: Size = 0.05
    sigma_end: Annotated[Size, Field(gt=0)] = 0.0005
    num_stages: Annotated[int, Field(ge=3)] = 10
    """Not used by `epoch_aware`, whose σ falls smoothly within an epoch."""
    epoch_aware: StrictBool = False
    target_modules: Norms = []
    """Empty for all norms."""
    exclude_patterns: Norms = []

    def meaning(self, config: Mapping[str, Any]) -> AQN:
        norms = tuple(name for name in self.target_modules if name not in self.exclude_patterns)
        if self.exclude_patterns and not norms:
            raise ShaketableError(f"{self.name}.exclude_patterns leaves nothing of target_modules; list the wanted norms there")
        schedule: Schedule = GlobalDecay(self.sigma_start, self.sigma_end, self.num_stages)
        if self.epoch_aware:
            schedule = _by_epochs(self.sigma_start, self.sigma_end, config)
        return AQN(schedule, unit="absolute", roles=norms or ("rmsnorm",))


class OutputNoise(Keys):
    """The guided experiments' noise y + z·σ·|y| on what decoder layers return, in rollouts and in training."""

    name = "aqn"
    size = "sigma"
    note = "σ falls by 100 in all, as the origin's did"

    target_layers: Layers = None
    sigma: Size | None = None
    schedule: Literal["epoch_aware", "global_decay", "constant"] = "epoch_aware"
    layer_specific: StrictBool = False
    base_sigma: Annotated[Size, Field(gt=0)] | None = None
    """σ of the layers that `layer_sigmas` does not name."""
    layer_sigmas: dict[Annotated[int, Field(ge=0)], Size] | None = None
    high_priority_layers: Any = None
    """Not used: σ of each layer is in `layer_sigmas`."""

    def meaning(self, config: Mapping[str, Any]) -> AQN:
        if self.layer_specific is not bool(self.layer_sigmas):
            raise ShaketableError(f"{self.name}.layer_specific: true and {self.name}.layer_sigmas need each other")
        sigma: float = self.needed("base_sigma" if self.layer_specific else "sigma")
        factors = {layer: _short(own / sigma) for layer, own in sorted((self.layer_sigmas or {}).items())}
        schedule: Schedule = Constant(sigma) if self.schedule == "constant" else GlobalDecay(sigma, sigma / 100)
        if self.schedule == "epoch_aware":
            schedule = _by_epochs(sigma, sigma / 100, config)
        return AQN(
            schedule,
            form="output",
            layers=None if self.target_layers is None else tuple(sorted(set(self.target_layers))),
            multipliers={layer: factor for layer, factor in factors.items() if factor != 1},
            where="both",
        )


GROUPS = (ModuleErrors, OperatorErrors, DeadZone, WeightNoise, OutputNoise)


def _by_epochs(start: float, end: float, config: Mapping[str, Any]) -> EpochAware:
    """The documents' own boundaries for two epochs and a fall by 100; otherwise geometric."""
    epochs = (_group(config, "trainer") or {}).get("total_epochs")
    if not isinstance(epochs, int):
        raise ShaketableError("an epoch-aware schedule needs trainer.total_epochs, a whole number")
    if epochs == 2 and _short(start / 100) == _short(end):
        return EpochAware([(start, _short(start / 5)), (_short(start / 5), _short(end))])
    return EpochAware([(_short(a), _short(b)) for a, b in EpochAware.between(start, end, epochs).epochs])


def _short(value: float) -> float:
    return float(f"{value:.12g}")


def _with_variables(group: Any, environ: Mapping[str, str]) -> Any:
    """`trainer.noisy_ops` with `VERL_NOISY_OPS_*`. One reached the origin's driver, the other its workers: they must agree."""
    asked = {name: text.strip() for name, text in environ.items() if name.startswith("VERL_NOISY_OPS_") and text.strip()}
    if not asked:
        return group
    if unknown := next((name for name in asked if name not in VARIABLES), None):
        raise ShaketableError(f"{unknown}: unknown variable; {nearest(unknown, VARIABLES)}")
    if "VERL_NOISY_OPS_ENABLED" not in asked:
        raise ShaketableError(f"{next(iter(asked))} is set and VERL_NOISY_OPS_ENABLED is not; set VERL_NOISY_OPS_ENABLED=1")
    given: dict[str, Any] = {VARIABLES[name]: text for name, text in asked.items()}
    given["enabled"] = {"1": True, "true": True, "0": False, "false": False}.get(given["enabled"].lower(), given["enabled"])
    own, other = (None if keys is None else read_keys(OperatorErrors, OperatorErrors.name, keys) for keys in (group, given))
    if own is not None and own != other:
        raise ShaketableError(f"{OperatorErrors.name} and VERL_NOISY_OPS_* are not the same; drop one of them")
    return given


# ---- spellings


def grouped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with flat keys (`deadzone_layer`) and dotted ones of YAML files in their groups; others are left alone.

    Raises:
        ShaketableError: A key is written in two spellings, or in `rollout`, where verl would fail in a worker.
    """
    for key, value in (_group(config, "actor_rollout_ref.rollout") or {}).items():
        if (full := dotted(str(key))) is not None:
            where = f"actor_rollout_ref.rollout.{key}"
            raise ShaketableError(f"{where}: verl's rollout has no such key; write +{full}={value} instead")
    whole = dict(config)
    for key in map(str, config):
        if (full := dotted(key)) is None:
            continue
        value = whole.pop(key)
        *above, last = full.split(".")
        at = whole
        for part in above:
            at[part] = dict(at.get(part) or {})
            at = at[part]
        if at.get(last) is not None:
            raise ShaketableError(f"{key} and {full} are the same key; write one of them")
        at[last] = value
    return whole


def dotted(key: str) -> str | None:
    """The key as a dotted path to or into one of the origin's groups; None where it is not the origin's, or has no dots."""
    group, _, rest = key.partition("_")
    full = f"{group}.{rest}" if group in FLAT and rest else key
    return full if "." in full and any(f"{full}.".startswith(f"{found.name}.") for found in GROUPS) else None


def _group(config: Any, path: str) -> Any:
    """What a config has at a dotted path; None where it has nothing."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config

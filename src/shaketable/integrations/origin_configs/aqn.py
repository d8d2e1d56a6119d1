"""The origin's two kinds of AQN. Imports no torch.

`trainer.noise_injection` is QeRL's: w + z·σ on the weights of norms while the policy samples. Its σ is absolute, so
`unit=absolute` here, against our default; on a small model 0.05 is then destructive, and that is what the config asks for.

`aqn`, from the guided experiments, is another noise: y + z·σ·|y| on what chosen decoder layers return, in rollouts and in
the forwards of training. So it becomes `form=output,where=both` with relative σ. `where: rollout`, a key of ours, keeps it
in the sampler.

**Per-layer σ.** `layer_sigma_config` never reached the origin's rollout worker. Here it becomes multipliers and layers of
the one AQN that travels, so there is no second way for it to get lost. With `default_multiplier: 0` the named layers alone
have noise; otherwise the rest, and the final norm, have the default. It is on when it is there, unless it says `enabled:
false`: the origin wanted `enabled: true`, and without it read past the multipliers and had the same noise everywhere.

**Epochs.** Over two epochs a fall by 100 has the documents' own boundary: 0.05 → 0.01, then 0.01 → 0.0005. Any other fall, or
number of epochs, is geometric between epochs, as the origin's code was; the printed line says which. Within an epoch σ falls
smoothly: the origin's stages began with a silent one in each epoch. `stages_per_epoch` is therefore accepted and said to have
no effect; so is `num_stages`, which it never had a use for there.

**σ of each layer in `aqn`**, the shape of the origin's `aqn_config.yaml`: a layer that `layer_sigmas` does not name has the
base σ, as in the origin's trainer. A file named by `aqn.config` is read by `AQN.load` and means what it means everywhere: in
files of `shaketable guide` such a layer has no noise.

Which norms: an empty list means all norms of a dense model and `post_attention_layernorm` of a mixture of experts, the
origin's own rule. A list of norms by their names is AQN's `roles`. Names that are taken out of all norms cannot be said in
AQN; the error has the list to write instead.

Rejected: mapping `zone_schedule` to our zones. It lists layers (0-5 and 23-27 in the one config there is), ours are equal
shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shaketable.aqn.schedules import AnySchedule, Constant, EpochAware, GlobalDecay, LinearDecay
from shaketable.aqn.spec import AQN, NORMS, ROLES, from_guidance
from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs.keys import LEFT_OUT, Found, OriginKeys, as_number, naming
from shaketable.io.yaml_file import read_yaml

WEIGHTS = "trainer.noise_injection"
OUTPUTS = "aqn"
WEIGHT_KEYS = ("enabled", "sigma_start", "sigma_end", "num_stages", "epoch_aware", "stages_per_epoch", "target_modules")
WEIGHT_MORE = ("exclude_patterns", "layer_types", "layer_sigma_config")
OUTPUT_KEYS = ("enabled", "target_layers", "sigma", "schedule", "where", "config")
GUIDED_KEYS = ("layer_specific", "base_sigma", "layers", "layer_sigmas", "high_priority_layers")
LAYER_KEYS = ("enabled", "default_multiplier", "layer_multipliers", "zone_schedule")
ALL_NORMS = ("rmsnorm", "norm")
SCHEDULES = ("epoch_aware", "global_decay", "linear_decay", "constant")


def weights(config: Mapping[str, Any]) -> Found | None:
    """`trainer.noise_injection`: noise on the weights of norms, in the sampler."""
    keys = OriginKeys.of(config, WEIGHTS, WEIGHT_KEYS + WEIGHT_MORE)
    if keys is None:
        return None
    if not keys.is_on():
        return Found(WEIGHTS)
    start = keys.number("sigma_start", 0.05)
    if start == 0:
        return Found(WEIGHTS, "off: sigma_start is 0")
    roles = _roles(keys)
    default, layers, multipliers = _layer_factors(keys, start)
    schedule, note = _weight_schedule(keys, config, start, default)
    with naming(WEIGHTS):
        aqn = AQN(schedule, unit="absolute", roles=roles, layers=layers, multipliers=multipliers)
    return Found(WEIGHTS, note, aqn=aqn)


def outputs(config: Mapping[str, Any]) -> Found | None:
    """`aqn`: relative noise on what decoder layers return."""
    keys = OriginKeys.of(config, OUTPUTS, OUTPUT_KEYS + GUIDED_KEYS)
    if keys is None:
        return None
    if "config" in keys.values:
        return _from_file(keys, config)
    if not keys.is_on():
        return Found(OUTPUTS)
    kind = keys.word("schedule", "epoch_aware", SCHEDULES)
    where = keys.word("where", "both", ("both", "rollout"))
    sigma, multipliers, unused = _layer_sigmas(keys)
    if sigma == 0:
        return Found(OUTPUTS, "off: sigma is 0")
    with naming(OUTPUTS):
        schedule, note = _schedule(kind, sigma, sigma / 100, 10, config)
        layers = keys.layers("layers" if "layers" in keys.values else "target_layers")
        aqn = AQN(schedule, form="output", layers=layers, multipliers=multipliers, where=where)
    fall = "" if kind == "constant" else "σ falls by 100 in all, as the origin's did"
    return Found(OUTPUTS, "; ".join(part for part in (fall, note, unused) if part), aqn=aqn)


def _from_file(keys: OriginKeys, config: Mapping[str, Any]) -> Found:
    """The AQN of the file that `aqn.config` names; beside it stands at most another schedule, as `--aqn_schedule` did."""
    if other := next((key for key in keys.values if key not in ("config", "schedule", "enabled")), None):
        raise keys.problem(other, f"the file of {OUTPUTS}.config says it; write it there")
    if not keys.flag("enabled", True):
        return Found(OUTPUTS)
    path = Path(str(keys.values["config"]))
    with naming(f"{OUTPUTS}.config"):
        aqn, note = AQN.load(path), ""
        if "schedule" in keys.values:
            peak = aqn.schedule.peak()
            schedule, note = _schedule(keys.word("schedule", "", SCHEDULES), peak, peak / 100, 10, config)
            aqn = aqn.model_copy(update={"schedule": schedule})
    return Found(OUTPUTS, note, aqn=aqn)


def _layer_sigmas(keys: OriginKeys) -> tuple[float, dict[int, float], str]:
    """σ of a layer that has none of its own, the factors of the others, and what was not used."""
    if "sigma" in keys.values and "base_sigma" in keys.values and keys.number("sigma") != keys.number("base_sigma"):
        raise keys.problem("sigma", f"and base_sigma is {keys.number('base_sigma'):g}; write one of them")
    sigma = keys.number("base_sigma" if "base_sigma" in keys.values else "sigma")
    given = keys.values.get("layer_sigmas")
    if given is None and keys.flag("layer_specific"):
        raise keys.problem("layer_sigmas", "layer_specific needs it: a mapping of layers to σ such as {15: 0.1}")
    if given is None:
        return sigma, {}, ""
    if "layer_specific" not in keys.values:
        raise keys.problem("layer_sigmas", f"it is used with +{OUTPUTS}.layer_specific=true, and that is not there")
    if not keys.flag("layer_specific"):
        return sigma, {}, "layer_sigmas not used: layer_specific is false"
    factors = _factors(given, f"{OUTPUTS}.layer_sigmas")
    if sigma == 0:
        raise keys.problem("base_sigma", "it is what layer_sigmas are measured by: write a number above 0")
    return sigma, _beside({layer: own / sigma for layer, own in factors.items()}), ""


def _roles(keys: OriginKeys) -> tuple[str, ...]:
    """Whose weights: the norms that `target_modules` names, or all of `layer_types`."""
    chosen = keys.words("target_modules", (), (*ALL_NORMS, *NORMS))
    excluded = keys.words("exclude_patterns", (), (*LEFT_OUT, *NORMS))
    named = tuple(name for name in chosen if name in NORMS)
    if not named:
        rest = ",".join(name for name in NORMS if name not in excluded)
        if any(name in NORMS for name in excluded):
            raise keys.problem("exclude_patterns", f"name the norms that are wanted: +{WEIGHTS}.target_modules=[{rest}]")
        return keys.words("layer_types", ("rmsnorm",), ROLES)
    kept = tuple(name for name in named if name not in excluded)
    if not kept or len(named) < len(chosen) or keys.values.get("layer_types"):
        raise keys.problem("target_modules", f"write either norms by name ({', '.join(NORMS)}), or leave it empty for all")
    return kept


def _weight_schedule(keys: OriginKeys, config: Mapping[str, Any], start: float, factor: float) -> tuple[AnySchedule, str]:
    stages, end = keys.whole("num_stages", 10, least=3, most=10**6), keys.number("sigma_end", 0.0005, above=0)
    if end > start:
        raise keys.problem("sigma_end", f"a decay ends at or below sigma_start, which is {start:g}")
    by_epoch = keys.flag("epoch_aware")
    with naming(WEIGHTS):
        kind = "epoch_aware" if by_epoch else "global_decay"
        schedule, note = _schedule(kind, _short(start * factor), _short(end * factor), stages, config)
    if not by_epoch:
        return schedule, note
    unused = [key for key in ("num_stages", "stages_per_epoch") if key in keys.values]
    smooth = f"{' and '.join(unused)} not used: σ falls smoothly within an epoch and none of it is silent" if unused else ""
    return schedule, "; ".join(part for part in (smooth, note) if part)


def _schedule(kind: str, start: float, end: float, stages: int, config: Mapping[str, Any]) -> tuple[AnySchedule, str]:
    if kind == "constant":
        return Constant(start), ""
    if kind == "global_decay":
        return GlobalDecay(start, end, stages), ""
    if kind == "linear_decay":
        return LinearDecay(start, end), ""
    epochs, note = _epochs(config)
    if epochs == 2 and _short(start / 100) == _short(end):
        return EpochAware([(_short(a), _short(b)) for a, b in ((start, start / 5), (start / 5, end))]), note
    exact = EpochAware.between(start, end, epochs)
    even = "epochs in geometric progression: the documents have boundaries for two epochs and a fall by 100 only"
    note = "; ".join(part for part in (even, note) if part)
    return EpochAware([(_short(first), _short(last)) for first, last in exact.epochs]), note


def _epochs(config: Mapping[str, Any]) -> tuple[int, str]:
    """The number of epochs, which the trainer's own keys have."""
    trainer = config.get("trainer")
    own = {key: value for key, value in trainer.items() if value is not None} if isinstance(trainer, Mapping) else {}
    if "total_epochs" not in own:
        raise ShaketableError("trainer.total_epochs is missing; an epoch-aware schedule needs the number of epochs")
    epochs = OriginKeys("trainer", own).whole("total_epochs", least=1, most=1000)
    if "total_training_steps" not in own:
        return epochs, ""
    return epochs, "an epoch is a pass through the data; where trainer.total_training_steps ends the run, the rest is left out"


def _layer_factors(keys: OriginKeys, start: float) -> tuple[float, tuple[int, ...] | None, dict[int, float]]:
    """Factor of the layers that are not named, the layers with noise (None is all), and factors beside that one."""
    name, data = f"{keys.name}.layer_sigma_config", keys.values.get("layer_sigma_config")
    if isinstance(data, str | Path):
        data = read_yaml(Path(data), name)
    if data is None or data == {}:
        return 1.0, None, {}
    if isinstance(data, Mapping) and "aqn" in data:
        with naming(name):
            guided = from_guidance(data, "the guidance")
        return 1.0, guided.layers, guided.multipliers
    if isinstance(data, Mapping) and all(as_number(layer) is not None for layer in data):
        factors = _factors(data, name)
        return 1.0, None, _beside({layer: sigma / start for layer, sigma in factors.items()})
    return _multiplied(OriginKeys.inside(data, name, LAYER_KEYS))


def _multiplied(keys: OriginKeys) -> tuple[float, tuple[int, ...] | None, dict[int, float]]:
    if not keys.flag("enabled", True):
        return 1.0, None, {}
    zones = keys.values.get("zone_schedule", {"enabled": False})
    if not isinstance(zones, Mapping) or zones.get("enabled") is not False:
        raise keys.problem("zone_schedule", "use AQN's own zones instead, e.g. +shaketable.aqn='global_decay:…,zones=on'")
    default = keys.number("default_multiplier", 1.0)
    factors = _factors(keys.values.get("layer_multipliers", {}), f"{keys.name}.layer_multipliers")
    if default > 0:
        return default, None, _beside({layer: factor / default for layer, factor in factors.items()})
    layers = tuple(layer for layer, factor in factors.items() if factor > 0)
    if not layers:
        raise keys.problem("default_multiplier", "no layer of layer_multipliers is above 0, so there would be no noise")
    return 1.0, layers, _beside({layer: factors[layer] for layer in layers})


def _factors(data: object, name: str) -> dict[int, float]:
    """Layer to number; layers may be text, for JSON has no other keys."""
    if not isinstance(data, Mapping):
        raise ShaketableError(f"{name} is {data!r}; write a mapping of layers to numbers such as {{14: 1.5}}")
    found: dict[int, float] = {}
    for key in data:
        layer = as_number(key)
        if layer is None or layer < 0 or layer != int(layer) or layer >= 10**6 or int(layer) in found:
            raise ShaketableError(f"{name}.{key}: not the index of a layer, or given twice; write e.g. {{14: 1.5}}")
        found[int(layer)] = OriginKeys(name, {str(key): data[key]}).number(str(key))
    return dict(sorted(found.items()))


def _beside(factors: Mapping[int, float]) -> dict[int, float]:
    """Factors as they are written down: without rounding's tail, and without those that are 1."""
    short = {layer: _short(factor) for layer, factor in factors.items()}
    return {layer: factor for layer, factor in short.items() if factor != 1}


def _short(value: float) -> float:
    return float(f"{value:.12g}")

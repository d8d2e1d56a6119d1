"""The origin's three kinds of faults, as clauses of a plan: on modules, on operators, and the dead zone. Imports no torch.

**Never in validation.** The origin's operator noise was on in every process and at all times, validation included, so its
"final accuracy" was a noisy score (70.58 where the clean one was 77 to 79). What it meant to study is training on hardware
that is off, so operator noise and dead zones are `phase=rollout+train` here, as is `apply_during: both`. Who wants a noisy
score asks for it, with a sweep, in a column that says so.

**The dead zone's maximum is per token.** The origin took it over the whole tensor: with a few massive activations in it,
0.01 of that maximum zeroes 99.9 % of a middle layer and costs 12 nats, and nothing could be learnt from runs in which all
arms were destroyed. `scope: tensor`, a key that the origin did not have, asks for that again; the printed line says which
one it is.

**lm_head is left out**, as in every plan: `linear` had hit it in the origin's trainer and not in its sampler.

Rejected: `phase` left empty for operator noise, as the origin had it. It would be faithful to a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shaketable.errors import ShaketableError, nearest
from shaketable.integrations.origin_configs.keys import FALSE, LEFT_OUT, TRUE, Found, OriginKeys, as_number, naming, shown
from shaketable.layer_ranges import join_layers
from shaketable.plan import Plan

HARDWARE = "trainer.hw_error_injection"
OPERATORS = "trainer.noisy_ops"
DEADZONE = "deadzone"

NOISE = ("relative_gaussian", "absolute_gaussian", "systematic_bias")
FORMATS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8_e4m3"}
POINTS = {"input": "input", "output": "output", "weight": "weight", "both": "weight+input"}
PHASES = {"rollout": "rollout", "training": "train", "both": "rollout+train"}
SCOPES = ("token", "block", "tensor")
TARGETS = {
    **{name: (name,) for name in ("rmsnorm", "linear")},
    **{name: (name,) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")},
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")},
    **{name: (name,) for name in ("input_layernorm", "post_attention_layernorm")},
    "rmsnorm_down_proj": ("rmsnorm", "down_proj"),
    "all": ("rmsnorm", "linear"),
}

HARDWARE_KEYS = ("enabled", "error_scale", "error_type", "injection_point", "apply_during", "target_modules")
HARDWARE_MORE = ("target_layers", "exclude_modules", "use_ste", "deadzone_threshold", "scope")
OPERATOR_KEYS = ("enabled", "error_scale", "error_type", "all_ops_mode")
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WANTED = "a plan names what it hits: list the wanted layers in target_layers instead"
USE_DEADZONE = "a dead zone has a group of its own: +deadzone.enabled=true +deadzone.layer=15 +deadzone.threshold=0.01"
DEADZONE_KEYS = ("enabled", "layer", "threshold", "sparsity", "scope")

VARIABLES = {
    "VERL_NOISY_OPS_ENABLED": "enabled",
    "VERL_NOISY_OPS_SCALE": "error_scale",
    "VERL_NOISY_OPS_TYPE": "error_type",
    "VERL_NOISY_OPS_ALL_OPS": "all_ops_mode",
    "VERL_NOISY_OPS_FORWARD_ONLY": "forward_only",
    "VERL_NOISY_OPS_BACKWARD_ONLY": "backward_only",
    "VERL_NOISY_OPS_TRAINING_ONLY": "training_only",
}


def hardware(config: Mapping[str, Any]) -> Found | None:
    """`trainer.hw_error_injection`: errors on modules, or a dead zone on decoder layers."""
    keys = OriginKeys.of(config, HARDWARE, HARDWARE_KEYS + HARDWARE_MORE)
    if keys is None:
        return None
    if not keys.is_on():
        return Found(HARDWARE)
    kind = keys.word("error_type", "relative_gaussian", (*NOISE, "deadzone", *FORMATS))
    if not keys.flag("use_ste", True):
        raise keys.problem("use_ste", "formats are straight-through: leave it out, or write true")
    if kind == "deadzone":
        keys.only("exclude_modules", LEFT_OUT, WANTED)
        return _hardware_deadzone(keys)
    scale = "" if kind in FORMATS else _magnitude(keys.number("error_scale", 1e-5))
    if scale == ":0":
        return Found(HARDWARE, "off: error_scale is 0")
    names, note = _targets(keys, kind)
    layers = keys.layers("target_layers")
    inside = "" if layers is None else f",layers={join_layers(layers)}"
    site = f"module.{'+'.join(names)},point={_point(keys)}{inside},phase={_phase(keys)}"
    return _found(HARDWARE, f"{FORMATS.get(kind, kind)}{scale}@{site}", note)


def operators(config: Mapping[str, Any], environ: Mapping[str, str]) -> Found | None:
    """`trainer.noisy_ops` and `VERL_NOISY_OPS_*`, which may both be there and must agree."""
    keys, given = OriginKeys.of(config, OPERATORS, OPERATOR_KEYS), _variables(environ)
    if keys is None and not given:
        return None
    values = _merged(keys.values if keys is not None else {}, given)
    both = OriginKeys(OPERATORS, values)
    name = " and ".join([OPERATORS] * (keys is not None) + ["VERL_NOISY_OPS_*"] * bool(given))
    if given and "enabled" not in values:
        first = next(iter(given.values()))[0]
        on = "VERL_NOISY_OPS_ENABLED"
        raise ShaketableError(f"{first} is set and {on} is not; set {on}=1, or unset {first}")
    if not both.is_on():
        return Found(name)
    if both.values.get("error_type") == "deadzone":
        raise both.problem("error_type", USE_DEADZONE)
    if "error_scale" not in values:
        scale = f"{OPERATORS}.error_scale, or VERL_NOISY_OPS_SCALE, is missing"
        raise ShaketableError(f"{scale}; without it the origin took 1e-5 in one process and 1e-4 in another")
    kind, scale = both.word("error_type", "relative_gaussian", NOISE), _magnitude(both.number("error_scale"))
    if scale == ":0":
        return Found(name, "off: the scale is 0")
    family = "all" if both.flag("all_ops_mode") else "matmul"
    way = _direction(both)
    phase = "train" if both.flag("training_only") or both.flag("backward_only") else "rollout+train"
    note = "a sampler has no backward" if both.flag("backward_only") else "not in validation, where the origin had it too"
    return _found(name, f"{kind}{scale}@op.{family}{way},phase={phase}", note)


def dead_zone(config: Mapping[str, Any]) -> Found | None:
    """`deadzone`: small values of what decoder layers return are zeroed."""
    keys = OriginKeys.of(config, DEADZONE, DEADZONE_KEYS)
    if keys is None:
        return None
    if not keys.is_on():
        return Found(DEADZONE)
    keys.value("layer")
    sparsity = keys.number("sparsity", 1.0, above=0, most=1)
    part = "" if sparsity == 1 else f",sparsity={sparsity!r}"
    return _dead_zone(keys, "threshold", "layer", part, "phase=rollout+train")


def _hardware_deadzone(keys: OriginKeys) -> Found:
    if _point(keys) not in ("input", "output"):
        raise keys.problem("injection_point", "a deadzone acts on decoder layers; write input or output")
    ignored = "; target_modules is not used by deadzone" if keys.values.get("target_modules") else ""
    where = f"point={_point(keys)},phase={_phase(keys)}"
    return _dead_zone(keys, "deadzone_threshold", "target_layers", "", where, ignored)


def _dead_zone(keys: OriginKeys, threshold: str, layers: str, part: str, where: str, more: str = "") -> Found:
    """A dead zone on the layers that the key `layers` names, with the threshold that the key `threshold` has."""
    value, chosen = keys.number(threshold, 0.01, most=1), keys.layers(layers)
    scope = keys.word("scope", "token", SCOPES)
    if value == 0:
        return Found(keys.name, f"off: {threshold} is 0")
    differs = f"the maximum is per {scope}; the origin took the whole tensor's, and {keys.name}.scope=tensor does"
    note = "the maximum is over the whole tensor, as in the origin" if scope == "tensor" else differs
    place = "all" if chosen is None else join_layers(chosen)
    return _found(keys.name, f"dead_zone{_magnitude(value)},scope={scope}{part}@layer.{place},{where}", note + more)


def _found(name: str, clause: str, note: str) -> Found:
    with naming(name):
        return Found(name, note, plan=Plan.parse(clause))


def _targets(keys: OriginKeys, kind: str) -> tuple[tuple[str, ...], str]:
    chosen = keys.words("target_modules", ("rmsnorm",), tuple(TARGETS))
    named = tuple(dict.fromkeys(name for word in chosen for name in TARGETS[word]))
    names = tuple(name for name in named if name not in keys.names("exclude_modules"))
    if not names:
        raise keys.problem("exclude_modules", f"it takes away all of target_modules, {', '.join(named)}")
    keys.only("exclude_modules", (*LEFT_OUT, *named), _wanted(keys, names))
    if kind in FORMATS and names == ("rmsnorm",):
        return ("linear",), f"{kind} acts on linears where target_modules names none, as in the origin; lm_head is left out"
    return names, "lm_head is left out" if "linear" in names else ""


def _wanted(keys: OriginKeys, names: tuple[str, ...]) -> str:
    """What to write in place of names that are taken out of `linear`: the others, as both sides call them."""
    excluded = keys.names("exclude_modules")
    if "linear" not in names or not any(name in LINEARS + SPLIT for name in excluded):
        return WANTED
    whole = LINEARS if PHASES[keys.word("apply_during", "rollout", tuple(PHASES))] == "rollout" else SPLIT
    kept = [n for n in names if n != "linear"] + [name for name in whole if name not in excluded]
    return f"a plan names what it hits: +{keys.name}.target_modules=[{','.join(kept)}] without exclude_modules"


def _point(keys: OriginKeys) -> str:
    return POINTS[keys.word("injection_point", "input", tuple(POINTS))]


def _phase(keys: OriginKeys) -> str:
    return PHASES[keys.word("apply_during", "rollout", tuple(PHASES))]


def _magnitude(value: float) -> str:
    return f":{value!r}".removesuffix(".0")


def _direction(keys: OriginKeys) -> str:
    forward, backward = keys.flag("forward_only"), keys.flag("backward_only")
    if forward and backward:
        both = "VERL_NOISY_OPS_FORWARD_ONLY and VERL_NOISY_OPS_BACKWARD_ONLY are both on"
        raise ShaketableError(f"{both}; set one of them, or neither for errors both ways")
    return ",direction=forward" if forward else ",direction=backward" if backward else ""


def _variables(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Field to (variable, value) of what the environment has; a variable that is empty is not there."""
    given: dict[str, tuple[str, Any]] = {}
    for name, text in environ.items():
        if not name.startswith("VERL_NOISY_OPS_") or not text.strip():
            continue
        if name not in VARIABLES:
            raise ShaketableError(f"{name}: unknown variable; {nearest(name, VARIABLES)}")
        given[VARIABLES[name]] = (name, _read(name, VARIABLES[name], text.strip()))
    return given


def _read(name: str, field: str, text: str) -> Any:
    if field == "error_type":
        if text == "deadzone":
            raise ShaketableError(f"{name} is {text!r}; {USE_DEADZONE}")
        if text not in NOISE:
            raise ShaketableError(f"{name} is {text!r}; {nearest(text, NOISE)}")
        return text
    if field == "error_scale":
        number = as_number(text)
        if number is None or number < 0:
            raise ShaketableError(f"{name} is {text!r}; write a number of 0 or more")
        return number
    if text.lower() not in TRUE + FALSE:
        raise ShaketableError(f"{name} is {text!r}; write 1 or 0")
    return text.lower() in TRUE


def _merged(config: Mapping[str, Any], given: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """What config and environment say together. Where both speak they must agree: one reaches the driver, one the workers."""
    on = config.get("enabled") is True or given.get("enabled", ("", False))[1] is True
    for field, (name, value) in given.items():
        own = as_number(config[field]) if field == "error_scale" and field in config else config.get(field, value)
        if on and own != value:
            raise ShaketableError(
                f"{OPERATORS}.{field} is {shown(config[field])} and {name} is {value!r}; make them agree, or drop one of them"
            )
    return {**{field: value for field, (_, value) in given.items()}, **config}

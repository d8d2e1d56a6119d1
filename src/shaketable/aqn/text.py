"""AQN as one line of text, and as a YAML file. Imports no torch.

    SCHEDULE:SIGMAS[,key=value…]

    global_decay:0.05-0.0005,stages=10
    epoch_aware:0.05-0.01+0.01-0.0005            or epoch_aware:0.05-0.0005,epochs=3
    constant:0.01,form=output,layers=15,where=both,unit=absolute,order=before
    global_decay:0.05-0.0005,multipliers=0:2+27:0.5,zones=edge:0.2+middle:0.5+after:0.5     (zones=on for the usual ones)

A YAML file holds the fields of `AQN`, `schedule` being such a line or a mapping; or it is what `shaketable guide` wrote: then
each layer's σ is schedule(step)·layer_sigma/base_sigma, a layer that `layer_sigmas` does not name has none, and neither has the
final norm. A schedule that is only named there (`epoch_aware`) starts at `base_sigma`.

With `srdd_metadata` in place of `metadata` it is the origin's own `aqn_config.yaml`, and means what its trainer did with it:
noise on what decoder layers return, in rollouts and in training, and the base σ for a layer that `layer_sigmas` does not name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shaketable.aqn.schedules import SCHEDULES, AnySchedule, Constant, EpochAware, GlobalDecay, like_the_origin, number
from shaketable.aqn.sigma_rules import checked
from shaketable.aqn.spec import AQN, Zones
from shaketable.errors import ShaketableError, nearest
from shaketable.io.yaml_file import read_yaml
from shaketable.layer_ranges import join_layers, parse_layers

KEYS = tuple(name for name in AQN.model_fields if name != "schedule")
OWN = {"global_decay": ("stages",), "epoch_aware": ("epochs",), "constant": ()}
_NUMBER = r"\d*\.?\d+(?:[eE][+-]?\d+)?|\d+\."


def load(source: str | Path | AQN) -> AQN:
    """AQN from AQN, a line of text, or the path of a YAML file."""
    if isinstance(source, AQN):
        return source
    if isinstance(source, Path) or re.search(r"\.ya?ml$", source.strip()):
        return _from_file(source if isinstance(source, Path) else Path(source.strip()))
    return parse(source)


def parse(line: str) -> AQN:
    """AQN from a line of text."""
    head, *parts = line.strip().split(",")
    pairs = _pairs(parts, line)
    kind = head.partition(":")[0].strip()
    own = {key: pairs.pop(key) for key in OWN.get(kind, ()) if key in pairs}
    schedule = _schedule(head, own)
    for key in pairs:
        _one_of(f"key for {kind}", key, (*OWN[kind], *KEYS))
    return AQN(schedule, **{key: _READ.get(key, str)(value) for key, value in pairs.items()})


def to_text(aqn: AQN) -> str:
    """The line that `parse` reads back."""
    fields = AQN.model_fields
    given = {key: getattr(aqn, key) for key in KEYS}
    usual = {key: fields[key].get_default(call_default_factory=True) for key in KEYS}
    parts = [f"{key}={_shown(key, value)}" for key, value in given.items() if value != usual[key]]
    return ",".join([aqn.schedule.text(), *parts])


def _shown(key: str, value: Any) -> str:
    if key == "layers":
        return join_layers(value)
    if isinstance(value, Zones):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return "+".join(f"{k}:{number(v)}" for k, v in value.items())
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _schedule(head: str, own: dict[str, str]) -> AnySchedule:
    kind, colon, values = (part.strip() for part in head.partition(":"))
    _one_of("schedule", kind, tuple(SCHEDULES))
    if not colon:
        raise ShaketableError(f"{kind} needs its σ, e.g. {_example(kind)}")
    if kind == "constant":
        return Constant(_value(values, kind))
    pairs = [_ends(text, kind) for text in re.split(r"(?<![eE])\+", values)]
    if kind == "epoch_aware" and "epochs" not in own:
        return EpochAware(tuple(pairs))
    if len(pairs) != 1:
        raise ShaketableError(f"{kind}:{values} has several decays where one is expected, e.g. {_example(kind)}")
    if kind == "epoch_aware":
        return EpochAware.between(*pairs[0], _whole("epochs", own["epochs"]))
    return GlobalDecay(*pairs[0], **{key: _whole(key, text) for key, text in own.items()})


def _example(kind: str) -> str:
    lines = {"constant": "constant:0.01", "epoch_aware": "epoch_aware:0.05-0.01+0.01-0.0005"}
    return lines.get(kind, "global_decay:0.05-0.0005,stages=10")


def _value(text: str, kind: str) -> float:
    if not re.fullmatch(_NUMBER, text.strip()):
        raise ShaketableError(f"{text.strip()!r} is no σ; write a number of 0 or more, e.g. {_example(kind)}")
    return float(text)


def _ends(text: str, kind: str) -> tuple[float, float]:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*-\s*({_NUMBER})\s*", text)
    if not match:
        raise ShaketableError(f"{text.strip()!r} is not START-END of σ; write e.g. {_example(kind)}")
    return float(match[1]), float(match[2])


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
    layer_sigmas: dict[int, float] = Field(min_length=1)
    high_priority_layers: list[int] = []


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


def _described(schedule: object) -> Any:
    """A schedule from a line of text; other data is left to the model."""
    if not isinstance(schedule, str):
        return schedule
    head, *parts = schedule.split(",")
    kind = head.partition(":")[0].strip()
    pairs = _pairs(parts, schedule)
    for key in pairs:
        _one_of(f"key for {kind}", key, OWN.get(kind, ()))
    return _schedule(head, pairs)


class _Scanned(BaseModel):
    """What the origin's file says of the scans it was made from; its date and the like are left alone."""

    model_config = ConfigDict(frozen=True)

    num_layers: int = Field(ge=1, le=10**6)


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
    named = schedule in ("epoch_aware", "global_decay")
    factors = {layer: float(f"{sigma / guided.base_sigma:.12g}") for layer, sigma in guided.layer_sigmas.items()}
    more = {str(key): body[key] for key in free if key in body}
    if "srdd_metadata" in data:
        factors = _of_every_layer(factors, data["srdd_metadata"], path)
        more = {"form": "output", "where": "both"} | more
    return AQN(
        like_the_origin(schedule, guided.base_sigma) if named else _described(schedule),
        layers=tuple(sorted(factors)),
        multipliers={layer: factor for layer, factor in sorted(factors.items()) if factor != 1},
        **more,
    )


def _of_every_layer(factors: Mapping[int, float], metadata: object, path: str) -> dict[int, float]:
    count = checked(_Scanned, metadata, f"srdd_metadata of {path}").num_layers
    if beyond := next((layer for layer in factors if not 0 <= layer < count), None):
        raise ShaketableError(f"{path}: layer_sigmas name layer {beyond}, and srdd_metadata has {count} layers")
    return {layer: factors.get(layer, 1.0) for layer in range(count)}

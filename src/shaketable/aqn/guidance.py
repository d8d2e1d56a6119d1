"""Layer-wise AQN from a diagnosis. Pure: a diagnosis in, σ per layer out. Imports no torch.

Every layer starts at the base σ, and each rule that it meets multiplies it, in the order of the mapping:

    σ_l = clamp(base · Π f_r  over the rules r that layer l meets)

A rule compares one statistic with a number, or with a multiple of that statistic's median over the layers; a rule on the
located layer looks at the verdict's fault class. A located dead zone counts as low gain, once: the origin guides by "low
gain, its signal is lost", and the gain itself does not see a dead zone of 0.01 where a layer has no massive values. The
origin study had its rules as `if` statements in its code. Here they are data (`mapping.yaml`): a study that asks whether a
threshold matters changes a file, and the result names the mapping it was made with.

Statistics of a broken model may be infinite or not numbers. The median is taken over the finite ones. An infinite value
compares as infinity does; one that is no number meets no rule, and its layer says so. A median that is zero or negative
gives no scale (1.2 · −1 lies below −1, so that the median layer itself would be "high"): its rule is left out, with a note.

The label and the list of high-priority layers use one comparison, σ > high · base, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shaketable.aqn.sigma_rules import Labels, LocatedRule, Rule, SigmaMapping, checked
from shaketable.errors import ShaketableError, nearest

if TYPE_CHECKING:
    from shaketable.aqn.spec import AQN

SCHEMA = 1
TARGETS = ("all", "fault", "healthy")
SCHEDULES = ("epoch_aware", "global_decay")


class _Probe(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    layer: int | None
    statistics: dict[str, float | None] | None = None


class _Diagnosis(BaseModel):
    """The part of a diagnosis that guidance reads; the rest is left alone."""

    model_config = ConfigDict(frozen=True, strict=True)

    model: str
    device: str
    date: str
    num_layers: int = Field(ge=1)
    verdict: Literal["HEALTHY", "FAULT", "INCONCLUSIVE"]
    layer: int | None
    fault_class: str | None
    probes: tuple[_Probe, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _covers_every_layer(self) -> _Diagnosis:
        layers = [p.layer for p in self.probes if p.layer is not None]
        if len(layers) != self.num_layers or set(layers) != set(range(self.num_layers)):
            raise ValueError(f"probes must name each of the {self.num_layers} layers once, and name {sorted(layers)}")
        if self.layer is not None and self.layer not in layers:
            raise ValueError(f"the verdict names layer {self.layer} of a model with {self.num_layers} layers")
        return self

    @property
    def fault_layer(self) -> int | None:
        """The layer that a verdict of FAULT names."""
        return self.layer if self.verdict == "FAULT" else None

    def statistic(self, field: str) -> list[float | None]:
        """One statistic of every layer, in order."""
        probes = sorted((p for p in self.probes if p.layer is not None), key=lambda p: p.layer or 0)
        return [_statistic(p, field) for p in probes]


@dataclass(frozen=True)
class LayerSigma:
    """The noise of one layer, and why."""

    layer: int
    sigma: float
    ratio: float
    label: Literal["HIGH", "LOW", "BASE"]
    why: tuple[str, ...]


@dataclass(frozen=True)
class Guidance:
    """σ of every targeted layer, and all that it was made from."""

    metadata: dict[str, Any]
    mapping: SigmaMapping
    base_sigma: float
    schedule: str
    layers: tuple[LayerSigma, ...]
    medians: dict[str, float | None]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        diagnosis: object,
        *,
        base_sigma: float = 0.05,
        schedule: str = "epoch_aware",
        target: str = "all",
        mapping: SigmaMapping | None = None,
    ) -> Guidance:
        """Guidance from a diagnosis, given as the object that its JSON holds.

        Args:
            diagnosis: What `shaketable locate --json` writes.
            base_sigma: σ of a layer that meets no rule.
            schedule: The name of the schedule that σ decays by in training.
            target: `all` layers, the located `fault` layer alone, or the `healthy` ones: all but it.
            mapping: Rules, clamp and labels; the origin's by default.
        """
        _one_of("schedule", schedule, SCHEDULES)
        _one_of("target", target, TARGETS)
        if not (math.isfinite(base_sigma) and base_sigma > 0):
            raise ShaketableError(f"base sigma must be a positive number, not {base_sigma}")
        read, rules = _read(diagnosis), mapping or SigmaMapping.load()
        values = {r.field: read.statistic(r.field) for r in rules.rules}
        medians = {r.field: _median(values[r.field]) for r in rules.rules if r.unit == "median"}
        layers = []
        for layer in _targeted(read, target):
            own = {field: column[layer] for field, column in values.items()}
            met = [r for r in rules.rules if _meets(r, own, medians)]
            steps = [*_steps(own, medians, met), *_located(read, layer, rules.located, {r.field for r in met})]
            layers.append(_layer(layer, float(base_sigma), steps, rules))
        metadata, notes = _metadata(read, target, rules.name), _notes(rules.rules, medians)
        return cls(metadata, rules, float(base_sigma), schedule, tuple(layers), medians, notes)

    @property
    def high_priority_layers(self) -> list[int]:
        """The layers labelled HIGH."""
        return [x.layer for x in self.layers if x.label == "HIGH"]

    def config(self) -> dict[str, Any]:
        """The AQN file, as data: the origin's shape. A layer that `layer_sigmas` does not name gets no noise."""
        aqn = {
            "enabled": True,
            "layer_specific": True,
            "base_sigma": self.base_sigma,
            "layer_sigmas": {x.layer: x.sigma for x in self.layers},
            "schedule": self.schedule,
            "high_priority_layers": self.high_priority_layers,
        }
        return {"aqn": aqn, "metadata": dict(self.metadata)}

    def aqn(self, **more: Any) -> AQN:
        """The noise itself; `more` are fields that guidance leaves open, such as `form` and `where`."""
        from shaketable.aqn.text import from_guidance

        return from_guidance({"aqn": {**self.config()["aqn"], **more}}, "the guidance")

    def to_yaml(self) -> str:
        """The AQN file. It loads back to the same numbers, bit for bit."""
        head = "# Written by shaketable guide. A layer that layer_sigmas does not name gets no noise.\n"
        return head + yaml.safe_dump(self.config(), sort_keys=False, allow_unicode=True)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON: the AQN file, the table with its reasons, and the mapping."""
        rows = [
            {"layer": x.layer, "sigma": x.sigma, "ratio": x.ratio, "label": x.label, "why": list(x.why)} for x in self.layers
        ]
        made_from = {"medians": dict(self.medians), "notes": list(self.notes), "mapping": self.mapping.model_dump(mode="json")}
        return {"schema": SCHEMA, "kind": "guidance", **self.config(), "layers": rows, **made_from}


def _read(diagnosis: object) -> _Diagnosis:
    if not isinstance(diagnosis, Mapping) or diagnosis.get("kind") != "diagnosis":
        raise ShaketableError("this is no diagnosis; expected what `shaketable locate --json FILE` writes")
    if diagnosis.get("schema") != SCHEMA:
        raise ShaketableError(f"the diagnosis has schema {diagnosis.get('schema')!r}; this version reads schema {SCHEMA}")
    return checked(_Diagnosis, diagnosis, "the diagnosis")


def _statistic(probe: _Probe, field: str) -> float | None:
    if not probe.statistics:
        raise ShaketableError(f"the diagnosis was made without statistics (layer {probe.layer} has none); guidance needs them")
    if field not in probe.statistics:
        raise ShaketableError(f"layer {probe.layer} has no statistic {field!r}; {nearest(field, probe.statistics)}")
    return probe.statistics[field]


def _targeted(read: _Diagnosis, target: str) -> list[int]:
    every = list(range(read.num_layers))
    if target == "all":
        return every
    if read.fault_layer is None:
        named = "outside of the decoder layers" if read.verdict == "FAULT" else "at no layer"
        raise ShaketableError(
            f"--target {target} needs a located layer; the verdict is {read.verdict} {named}; use --target all"
        )
    if target == "healthy" and read.num_layers == 1:
        raise ShaketableError("--target healthy leaves no layer: the model has one, and the fault is there")
    return [layer for layer in every if (layer == read.fault_layer) == (target == "fault")]


def _median(values: Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return median(finite) if finite else None


def _meets(rule: Rule, own: Mapping[str, float | None], medians: Mapping[str, float | None]) -> bool:
    value, bound = own[rule.field], rule.bound(medians)
    return value is not None and bound is not None and rule.met(value, bound)


def _steps(
    own: Mapping[str, float | None], medians: Mapping[str, float | None], met: Sequence[Rule]
) -> list[tuple[float, str]]:
    """Factor and reason of every rule on statistics that a layer meets; 1 for a statistic that is no number."""
    steps = [(1.0, f"{f} is not a number: its rules are left out") for f, v in own.items() if v is None or math.isnan(v)]
    return [*steps, *((rule.factor, rule.text(own[rule.field] or 0.0, medians)) for rule in met)]


def _located(read: _Diagnosis, layer: int, rules: Sequence[LocatedRule], met: Set[str]) -> list[tuple[float, str]]:
    if layer != read.fault_layer:
        return []
    found = [r for r in rules if r.fault_class == read.fault_class and r.instead_of not in met]
    return [(r.factor, f"{r.why} (×{r.factor:g})") for r in found]


def _layer(layer: int, base: float, steps: Sequence[tuple[float, str]], mapping: SigmaMapping) -> LayerSigma:
    product = base
    for factor, _ in steps:
        product *= factor
    clamp, why = mapping.clamp, [text for _, text in steps]
    sigma = max(clamp.low, min(product, clamp.high))
    if sigma != product:
        why.append(f"{product:.4g} is held at the {'lower' if product < sigma else 'upper'} bound {sigma:g}")
    return LayerSigma(layer, sigma, sigma / base, _label(sigma, base, mapping.labels), tuple(why))


def _label(sigma: float, base: float, labels: Labels) -> Literal["HIGH", "LOW", "BASE"]:
    if sigma > base * labels.high:
        return "HIGH"
    return "LOW" if sigma < base * labels.low else "BASE"


def _metadata(read: _Diagnosis, target: str, mapping: str) -> dict[str, Any]:
    facts = {"layers": read.num_layers, "date": read.date, "model": read.model, "device": read.device, "verdict": read.verdict}
    fault = {"fault_layer": read.fault_layer, "fault_class": read.fault_class}
    return {**facts, **fault, "target": target, "mapping": mapping}


def _notes(rules: Sequence[Rule], medians: Mapping[str, float | None]) -> tuple[str, ...]:
    off = {r.field: medians[r.field] for r in rules if r.bound(medians) is None}
    shown = {f: "none, for no value is finite" if m is None else f"{m:.4g}" for f, m in off.items()}
    return tuple(f"the median of {f} is {m}: it gives no scale, and the rules on it are left out" for f, m in shown.items())


def _one_of(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ShaketableError(f"unknown {what} {value!r}; {nearest(value, valid)}")

"""Layer-wise AQN: a diagnosis in, σ per layer out. Imports no torch.

Every layer starts at the base σ, and each rule that applies multiplies it, in the order of `RULES` and `FAULT_RULES`:

    σ_l = clamp(base · Π f_r  over the rules r that apply to layer l)

When a verdict of FAULT has evidence at several layers, all of them are located, each with its own class. A located dead zone
counts as low gain, once: the gain itself does not see a dead zone of 0.01 where a layer has no massive values.

The median is taken over finite values. An infinite value compares as infinity; NaN matches no rule. A median
of zero or less gives no scale, and its rules are left out, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shaketable.aqn.schedules import NAMED
from shaketable.errors import ShaketableError, check_word, first_problem

if TYPE_CHECKING:
    from shaketable.aqn.spec import AQN

SCHEMA = 1
TARGETS = ("all", "fault", "healthy", "high")
SCANS = ("gain", "kurtosis", "instability")


# ---- rules


@dataclass(frozen=True)
class Rule:
    """Multiplies σ of a layer whose statistic lies below or above a bound; the bound itself does not match."""

    statistic: str
    side: Literal["below", "above"]
    threshold: float
    factor: float
    why: str
    times_median: bool = False
    """The bound is threshold · the median over all layers."""

    def reason(self, value: float | None, middle: float | None) -> str | None:
        """What matched and its effect, for people; None where the rule does not apply, or the median gives no scale."""
        scale = middle if self.times_median else 1.0
        if value is None or scale is None:
            return None
        if not (value < self.threshold * scale if self.side == "below" else value > self.threshold * scale):
            return None
        times = f" × the median {scale:.4g}" if self.times_median else ""
        return f"{self.statistic} {value:.4g} is {self.side} {self.threshold:g}{times}: {self.why} (×{self.factor:g})"


@dataclass(frozen=True)
class FaultRule:
    """Multiplies σ of a located layer whose fault is of a class."""

    fault_class: str
    factor: float
    why: str
    instead_of: str | None = None
    """Left out where a rule on this statistic already applied."""


RULES = (
    Rule("gain", "below", 0.8, 1.5, "low gain, its signal may be lost", times_median=True),
    Rule("kurtosis", "above", 1.2, 1.5, "sharp peaks, easily saturated", times_median=True),
    Rule("instability", "above", 0.1, 0.5, "the hardware is noisy there already"),
)
FAULT_RULES = (
    FaultRule("saturation", 1.5, "the source of a saturation"),
    FaultRule("dead_zone", 1.5, "a dead zone, the origin's low gain: small signals are lost", instead_of="gain"),
)
LOWEST, HIGHEST = 0.01, 0.15
"""Bounds of every σ."""
LOW, HIGH = 0.8, 1.2
"""A layer is HIGH above 1.2 · base σ, LOW below 0.8 · base σ, else BASE."""


# ---- diagnoses


class _Statistics(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    gain: float | None
    kurtosis: float | None
    instability: float | None


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    layer: int | None
    statistics: _Statistics | None = None
    fault_class: str | None = None


class LayerDiagnosis(BaseModel):
    """The part of a diagnosis that guidance reads; the rest is left alone."""

    model_config = ConfigDict(frozen=True, strict=True)

    model: str
    device: str
    date: str
    num_layers: int = Field(ge=1)
    verdict: Literal["HEALTHY", "FAULT", "INCONCLUSIVE"]
    layer: int | None
    fault_class: str | None
    probes: tuple[_Place, ...] = Field(strict=False)
    evidence: tuple[_Place, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _covers_every_layer(self) -> LayerDiagnosis:
        layers = [p.layer for p in self.probes if p.layer is not None]
        if len(layers) != self.num_layers or set(layers) != set(range(self.num_layers)):
            raise ValueError(f"probes must name each of the {self.num_layers} layers once, and name {sorted(layers)}")
        for layer in (self.layer, *(e.layer for e in self.evidence)):
            if layer is not None and layer not in layers:
                raise ValueError(f"the verdict names layer {layer} of a model with {self.num_layers} layers")
        if (lacking := next((p.layer for p in self.probes if p.layer is not None and not p.statistics), None)) is not None:
            raise ValueError(f"it was made without statistics (layer {lacking} has none); guidance needs them")
        return self

    @classmethod
    def read(cls, data: object, name: str = "the diagnosis") -> LayerDiagnosis:
        """From what the JSON of `shaketable locate` holds. `name` is how an error calls it."""
        if not isinstance(data, Mapping) or data.get("kind") != "diagnosis":
            raise ShaketableError(f"{name}: expected what `shaketable locate --json FILE` writes")
        if data.get("schema") != SCHEMA:
            raise ShaketableError(f"{name} has schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ShaketableError(f"{name}: {first_problem(error)}") from None

    @property
    def located(self) -> dict[int, str | None]:
        """The layers that a verdict of FAULT has evidence of, with the class of each one's fault."""
        if self.verdict != "FAULT":
            return {}
        others = {e.layer: e.fault_class for e in reversed(self.evidence) if e.layer is not None}
        found = others if self.layer is None else {**others, self.layer: self.fault_class}
        return dict(sorted(found.items()))

    def statistic(self, field: str) -> list[float | None]:
        """One statistic of every layer, in order."""
        found = {p.layer: getattr(p.statistics, field) for p in self.probes if p.layer is not None}
        return [found[layer] for layer in range(self.num_layers)]


# ---- guidance


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
        name: str = "the diagnosis",
        base_sigma: float = 0.05,
        schedule: str = "epoch_aware",
        target: str = "all",
    ) -> Guidance:
        """Guidance from a diagnosis.

        Args:
            diagnosis: What the JSON of a diagnosis holds, see `LayerDiagnosis.read`.
            name: How an error calls it.
            base_sigma: σ of a layer that no rule applies to.
            schedule: Name of the schedule that σ decays by in training.
            target: `all` layers, the located ones alone (`fault`), all but those (`healthy`), or those labelled `high`.
        """
        check_word("schedule", schedule, NAMED)
        check_word("target", target, TARGETS)
        if not (math.isfinite(base_sigma) and base_sigma > 0):
            raise ShaketableError(f"base sigma must be a positive number, not {base_sigma}")
        read = LayerDiagnosis.read(diagnosis, name)
        base = float(base_sigma)
        values = {scan: read.statistic(scan) for scan in SCANS}
        medians = {rule.statistic: _median(values[rule.statistic]) for rule in RULES if rule.times_median}
        every = [
            _layer(layer, base, {scan: column[layer] for scan, column in values.items()}, medians, read.located.get(layer))
            for layer in range(read.num_layers)
        ]
        metadata = {
            "num_layers": read.num_layers,
            "analysis_date": read.date,
            "model": read.model,
            "device": read.device,
            "verdict": read.verdict,
            "fault_layers": read.located,
            "target": target,
        }
        notes = tuple(f"{scan} has no median above 0: the rules on it are left out" for scan, m in medians.items() if m is None)
        return cls(metadata, base, schedule, _targeted(every, read, target), medians, notes)

    @property
    def high_priority_layers(self) -> list[int]:
        """The layers labelled HIGH; `target="high"` keeps these alone."""
        return [x.layer for x in self.layers if x.label == "HIGH"]

    def config(self) -> dict[str, Any]:
        """The AQN file, as data, in the origin's shape. `layers` names all layers with noise: every reader means the same."""
        aqn = {
            "enabled": True,
            "layer_specific": True,
            "base_sigma": self.base_sigma,
            "layers": [x.layer for x in self.layers],
            "layer_sigmas": {x.layer: x.sigma for x in self.layers},
            "schedule": self.schedule,
            "high_priority_layers": self.high_priority_layers,
        }
        return {"aqn": aqn, "srdd_metadata": dict(self.metadata)}

    def aqn(self, **more: Any) -> AQN:
        """The noise itself; `more` are fields that guidance leaves open, such as `form` and `where`."""
        from shaketable.aqn.spec import from_guidance

        return from_guidance({"aqn": {**self.config()["aqn"], **more}}, "the guidance")

    def to_yaml(self) -> str:
        """The AQN file. It loads back to the same numbers, bit for bit."""
        head = "# Written by shaketable guide. Layers that `layers` does not name have no noise.\n"
        return head + yaml.safe_dump(self.config(), sort_keys=False, allow_unicode=True)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON: the AQN file, and the table with its reasons."""
        rows = [{**asdict(x), "why": list(x.why)} for x in self.layers]
        made_from = {"medians": dict(self.medians), "notes": list(self.notes)}
        return {"schema": SCHEMA, "kind": "guidance", **self.config(), "layers": rows, **made_from}


def _median(values: Sequence[float | None]) -> float | None:
    """The median of the finite values, as a scale; None where it is not above 0."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return found if finite and (found := median(finite)) > 0 else None


def _layer(
    layer: int, base: float, own: Mapping[str, float | None], medians: Mapping[str, float | None], fault: str | None
) -> LayerSigma:
    """σ of one layer: every rule that applies, then the clamp."""
    why = [f"{scan} is not a number: its rules are left out" for scan, v in own.items() if v is None or math.isnan(v)]
    product, applied = base, set[str]()
    for rule in RULES:
        if reason := rule.reason(own[rule.statistic], medians.get(rule.statistic)):
            applied.add(rule.statistic)
            product *= rule.factor
            why.append(reason)
    for located in FAULT_RULES:
        if fault == located.fault_class and located.instead_of not in applied:
            product *= located.factor
            why.append(f"{located.why} (×{located.factor:g})")
    sigma = max(LOWEST, min(product, HIGHEST))
    if sigma != product:
        why.append(f"{product:.4g} is held at the {'lower' if product < sigma else 'upper'} bound {sigma:g}")
    label: Literal["HIGH", "LOW", "BASE"] = "HIGH" if sigma > base * HIGH else "LOW" if sigma < base * LOW else "BASE"
    return LayerSigma(layer, sigma, sigma / base, label, tuple(why))


def _targeted(every: Sequence[LayerSigma], read: LayerDiagnosis, target: str) -> tuple[LayerSigma, ...]:
    if target == "all":
        return tuple(every)
    if target == "high":
        if not (found := tuple(x for x in every if x.label == "HIGH")):
            raise ShaketableError("--target high leaves no layer: none is labelled HIGH; use --target all")
        return found
    if not read.located:
        named = "outside of the decoder layers" if read.verdict == "FAULT" else "at no layer"
        raise ShaketableError(
            f"--target {target} needs a located layer; the verdict is {read.verdict} {named}; use --target all"
        )
    found = tuple(x for x in every if (x.layer in read.located) == (target == "fault"))
    if not found:
        raise ShaketableError(f"--target healthy leaves no layer: the fault is in each of the {read.num_layers}")
    return found

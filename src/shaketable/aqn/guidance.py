"""Layer-wise AQN from diagnoses: a diagnosis in, σ per layer out. Imports no torch.

Every layer starts at the base σ, and each rule that applies multiplies it, in the order of the table (`mapping.yaml`):

    σ_l = clamp(base · Π f_r  over the rules r that apply to layer l)

A rule compares one statistic with a number or with a multiple of its median over the layers, or names the fault class of a
located layer. When a verdict of FAULT has evidence at several layers, all of them are located, each with its own class. A
located dead zone counts as low gain, once: the gain itself does not see a dead zone of 0.01 where a layer has no massive
values.

The median is taken over finite values. An infinite value compares as infinity; NaN matches no rule. A median
of zero or less gives no scale, and its rules are left out, with a note.

The origin's scans (`gain`, `kurtosis`, `instability`, each of layers to numbers) are read as a diagnosis whose verdict is
INCONCLUSIVE, unless they name a `detected_layer`. Several diagnoses of one model are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shaketable.aqn.schedules import NAMED, checked
from shaketable.errors import ShaketableError, nearest
from shaketable.io.yaml_file import read_yaml

if TYPE_CHECKING:
    from shaketable.aqn.spec import AQN

SCHEMA = 1
TARGETS = ("all", "fault", "healthy", "high")
ORIGIN = Path(__file__).with_name("mapping.yaml")
SCANS = ("gain", "kurtosis", "instability")


# ---- rules


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rule(_Data):
    """One line of the table: compares a statistic, or names the class of a located fault; multiplies σ of matching layers."""

    factor: float = Field(gt=0)
    why: str
    """Shown beside each layer that it applies to."""
    field: str | None = None
    """The statistic: a key of the diagnosis's `statistics`."""
    when: Literal["below", "above"] | None = None
    """Which side of the bound matches. The bound itself does not."""
    threshold: float | None = None
    unit: Literal["median", "absolute"] = "absolute"
    """`median`: the bound is threshold · the median over all layers. `absolute`: it is the threshold."""
    fault_class: str | None = None
    instead_of: str | None = None
    """With fault_class: left out where a rule on this statistic already applied."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Rule:
        compares = {"field": self.field, "when": self.when, "threshold": self.threshold}
        if self.fault_class is None and (missing := [name for name, value in compares.items() if value is None]):
            raise ValueError(f"a rule has field, when and threshold, or fault_class; {missing[0]} is missing")
        if self.fault_class is not None and (more := [name for name, value in compares.items() if value is not None]):
            raise ValueError(f"a rule on fault_class compares nothing: drop {more[0]}")
        return self

    def bound(self, medians: Mapping[str, float | None]) -> float | None:
        """The number that is compared with; None where the median gives no scale."""
        assert self.field is not None
        assert self.threshold is not None
        if self.unit == "absolute":
            return self.threshold
        middle = medians[self.field]
        return None if middle is None or middle <= 0 else middle * self.threshold

    def matches(self, value: float | None, medians: Mapping[str, float | None]) -> bool:
        """Whether a value lies on the rule's side of the bound."""
        bound = self.bound(medians)
        return value is not None and bound is not None and (value < bound if self.when == "below" else value > bound)

    def text(self, value: float | None, medians: Mapping[str, float | None]) -> str:
        """What matched and its effect, for people."""
        if self.field is None or value is None:
            return f"{self.why} (×{self.factor:g})"
        scale = f" × the median {medians[self.field]:.4g}" if self.unit == "median" else ""
        return f"{self.field} {value:.4g} is {self.when} {self.threshold:g}{scale}: {self.why} (×{self.factor:g})"


class Clamp(_Data):
    """Bounds of every σ."""

    low: float = Field(ge=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _is_ordered(self) -> Clamp:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class Labels(_Data):
    """A layer is HIGH above `high` · base σ, LOW below `low` · base σ, else BASE."""

    high: float = Field(ge=1)
    low: float = Field(gt=0, le=1)


class SigmaMapping(_Data):
    """The table of rules."""

    name: str
    """Written into the AQN file, to tell which mapping made it."""
    rules: tuple[Rule, ...]
    clamp: Clamp
    labels: Labels

    @classmethod
    def load(cls, path: Path | None = None) -> SigmaMapping:
        """The mapping of a YAML file; the origin's by default."""
        path = path or ORIGIN
        return checked(cls, read_yaml(path, "the mapping"), f"the mapping {path}")


# ---- diagnoses


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    layer: int | None
    statistics: dict[str, float | None] | None = None
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
        """From what the JSON of `shaketable locate`, or of the origin's scans, holds. `name` is how an error calls it."""
        if isinstance(data, Mapping) and "kind" not in data and any(scan in data for scan in SCANS):
            return _of_scans(data, name)
        if not isinstance(data, Mapping) or data.get("kind") != "diagnosis":
            raise ShaketableError(f"{name}: expected what `shaketable locate --json FILE` writes")
        if data.get("schema") != SCHEMA:
            raise ShaketableError(f"{name} has schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        return checked(cls, data, name)

    @property
    def located(self) -> dict[int, str | None]:
        """The layers that a verdict of FAULT has evidence of, with the class of each one's fault."""
        if self.verdict != "FAULT":
            return {}
        others = {e.layer: e.fault_class for e in reversed(self.evidence) if e.layer is not None}
        found = others if self.layer is None else {**others, self.layer: self.fault_class}
        return dict(sorted(found.items()))

    @property
    def statistics(self) -> dict[int, dict[str, float | None]]:
        """Of every layer, in order."""
        found = {p.layer: p.statistics or {} for p in self.probes if p.layer is not None}
        return dict(sorted(found.items()))

    def statistic(self, field: str) -> list[float | None]:
        """One statistic of every layer, in order."""
        for layer, known in self.statistics.items():
            if field not in known:
                raise ShaketableError(f"layer {layer} has no statistic {field!r}; {nearest(field, known)}")
        return [known[field] for known in self.statistics.values()]


def _of_scans(data: Mapping[Any, Any], name: str) -> LayerDiagnosis:
    """The origin's scans as a diagnosis."""
    if missing := [scan for scan in SCANS if scan not in data]:
        lacking = " and no ".join(missing)
        raise ShaketableError(f"{name} has no {lacking}; scans are {', '.join(SCANS)}, each of layers to numbers")
    columns = {scan: _by_layer(data[scan], f"{scan} of {name}") for scan in SCANS}
    count = data.get("num_layers", max(max(column) for column in columns.values()) + 1)
    if not isinstance(count, int) or not 1 <= count < 10**6:
        raise ShaketableError(f"{name}: num_layers is {count!r}; write the number of decoder layers, or leave it out")
    for scan, column in columns.items():
        if odd := set(column) ^ set(range(count)):
            what = f"{scan} and the {count} layers differ at layer {min(odd)}"
            raise ShaketableError(f"{name}: {what}; every scan needs each layer once")
    layer = data.get("detected_layer")
    read = {
        "num_layers": count,
        "probes": [{"layer": i, "statistics": {scan: columns[scan][i] for scan in SCANS}} for i in range(count)],
        "model": str(data.get("model", data.get("model_path", "a model that its scans do not name"))),
        "device": str(data.get("device", "a device that is not named")),
        "date": str(data.get("date", data.get("analysis_date", "no date"))),
        "verdict": "INCONCLUSIVE" if layer is None else "FAULT",
        "layer": layer,
        "fault_class": None if layer is None else data.get("fault_type", "not classified"),
    }
    return checked(LayerDiagnosis, read, name)


def _by_layer(column: object, name: str) -> dict[int, float | None]:
    """Layers to numbers, from a mapping (whose keys JSON makes text) or a list."""
    pairs = enumerate(column) if isinstance(column, list) else column.items() if isinstance(column, Mapping) else ()
    found: dict[int, float | None] = {}
    for key, value in pairs:
        is_layer = str(key).isdecimal() and len(str(key)) < 7
        is_value = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not is_layer or not is_value or int(key) in found:
            raise ShaketableError(f"{name}: {key!r}: {value!r} is not a layer with its number, each once")
        found[int(key)] = None if value is None else float(value)
    if not found:
        raise ShaketableError(f"{name} must hold a mapping of layers to numbers, such as {{'0': 1.02}}")
    return found


def averaged(diagnoses: Mapping[str, LayerDiagnosis]) -> LayerDiagnosis:
    """One diagnosis with the mean statistics of several of the same model, by their names.

    The verdict is that of all of them if they agree, and INCONCLUSIVE if they do not.
    """
    (first_name, first), *_ = diagnoses.items()
    for name, other in diagnoses.items():
        for key in ("model", "num_layers"):
            mine, theirs = getattr(first, key), getattr(other, key)
            if mine != theirs:
                found = f"{key} {theirs!r} in {name} and {mine!r} in {first_name}"
                raise ShaketableError(f"diagnoses of different models are not averaged: {found}")
        if {i: set(row) for i, row in other.statistics.items()} != {i: set(row) for i, row in first.statistics.items()}:
            raise ShaketableError(f"{name} has other statistics than {first_name}; make all diagnoses with one version")
    every = list(diagnoses.values())
    probes = tuple(
        _Place(layer=i, statistics={field: _mean([d.statistics[i][field] for d in every]) for field in row})
        for i, row in first.statistics.items()
    )
    agree = len({(d.verdict, d.layer, d.fault_class) for d in every}) == 1
    verdict = {} if agree else {"verdict": "INCONCLUSIVE", "layer": None, "fault_class": None}
    return first.model_copy(update={"probes": probes, "evidence": tuple(e for d in every for e in d.evidence), **verdict})


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if len(numbers) == len(values) else None


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
        """Guidance from a diagnosis.

        Args:
            diagnosis: As `LayerDiagnosis.read` returns it, or the object that its JSON holds.
            base_sigma: σ of a layer that no rule applies to.
            schedule: Name of the schedule that σ decays by in training.
            target: `all` layers, the located ones alone (`fault`), all but those (`healthy`), or those labelled `high`.
            mapping: Rules, clamp and labels; the origin's by default.
        """
        _one_of("schedule", schedule, NAMED)
        _one_of("target", target, TARGETS)
        if not (math.isfinite(base_sigma) and base_sigma > 0):
            raise ShaketableError(f"base sigma must be a positive number, not {base_sigma}")
        read = diagnosis if isinstance(diagnosis, LayerDiagnosis) else LayerDiagnosis.read(diagnosis)
        rules, base = mapping or SigmaMapping.load(), float(base_sigma)
        values = {r.field: read.statistic(r.field) for r in rules.rules if r.field is not None}
        medians = {r.field: _median(values[r.field]) for r in rules.rules if r.field is not None and r.unit == "median"}
        every = [
            _layer(layer, base, {f: column[layer] for f, column in values.items()}, medians, read.located.get(layer), rules)
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
            "mapping": rules.name,
        }
        return cls(metadata, rules, base, schedule, _targeted(every, read, target), medians, _notes(rules.rules, medians))

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
        """All of it for JSON: the AQN file, the table with its reasons, and the mapping."""
        rows = [{**asdict(x), "why": list(x.why)} for x in self.layers]
        rules = self.mapping.model_dump(mode="json", exclude_none=True)
        made_from = {"medians": dict(self.medians), "notes": list(self.notes), "mapping": rules}
        return {"schema": SCHEMA, "kind": "guidance", **self.config(), "layers": rows, **made_from}


def _median(values: Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return median(finite) if finite else None


def _layer(
    layer: int,
    base: float,
    own: Mapping[str, float | None],
    medians: Mapping[str, float | None],
    fault: str | None,
    mapping: SigmaMapping,
) -> LayerSigma:
    """σ of one layer: every rule that applies, then the clamp."""
    why = [f"{f} is not a number: its rules are left out" for f, v in own.items() if v is None or math.isnan(v)]
    product, applied = base, set[str]()
    for rule in mapping.rules:
        if rule.field is None:
            if fault is None or rule.fault_class != fault or rule.instead_of in applied:
                continue
        elif rule.matches(own[rule.field], medians):
            applied.add(rule.field)
        else:
            continue
        product *= rule.factor
        why.append(rule.text(own[rule.field] if rule.field is not None else None, medians))
    sigma = max(mapping.clamp.low, min(product, mapping.clamp.high))
    if sigma != product:
        why.append(f"{product:.4g} is held at the {'lower' if product < sigma else 'upper'} bound {sigma:g}")
    high, low = sigma > base * mapping.labels.high, sigma < base * mapping.labels.low
    return LayerSigma(layer, sigma, sigma / base, "HIGH" if high else "LOW" if low else "BASE", tuple(why))


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


def _notes(rules: Sequence[Rule], medians: Mapping[str, float | None]) -> tuple[str, ...]:
    off = {r.field: medians[r.field] for r in rules if r.field is not None and r.bound(medians) is None}
    shown = {f: "none, for no value is finite" if m is None else f"{m:.4g}" for f, m in off.items()}
    return tuple(f"the median of {f} is {m}: it gives no scale, and the rules on it are left out" for f, m in shown.items())


def _one_of(what: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ShaketableError(f"unknown {what} {value!r}; {nearest(value, valid)}")

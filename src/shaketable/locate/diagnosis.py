"""The result of locate: the verdict, its assumptions, and every probe of every layer. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shaketable.io.strict_json import strict

SCHEMA = 1
MODES = ("device", "host", "all")
PROBES = ("weights", "repeat", "links", "twin", "causal", "replay", "batch", "decode")
EXIT = {"HEALTHY": 0, "FAULT": 1, "INCONCLUSIVE": 4}


@dataclass
class Result:
    """One probe of one layer."""

    status: str
    """pass, fail, suspect, inconclusive or skipped."""
    score: float | None = None
    op: str | None = None
    reason: str = ""


@dataclass
class Evidence:
    """Why a layer is blamed."""

    layer: int | None
    op: str | None
    function: str | None
    probe: str
    text: str
    fault_class: str
    lanes: list[int] = field(default_factory=list)
    lanes_of: int | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)
    after: str | None = None
    """For a function of the layer itself, such as a residual addition: the part of the layer whose result it takes."""
    place: float = 0.0
    """Order of computation: the layer's index, -1 before the layers, their number after them."""


@dataclass
class LayerStatistics:
    """SRDD's numbers of one layer, defined in `locate/srdd.py`; what is not defined is nan."""

    gain: float
    min_gain: float
    kurtosis: float
    instability: float
    pile_up: float
    distinct: int
    drop_z: float = math.nan
    """Set when all layers are known."""


@dataclass
class LayerReport:
    """All probes of one layer, or of what lies outside of the layers."""

    layer: int | None
    name: str
    results: dict[str, Result] = field(default_factory=dict)
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each operator: the number of rows it made, and how many of them were judged in which way."""
    statistics: LayerStatistics | None = None


@dataclass
class Diagnosis:
    """The answer of `locate`."""

    model: str
    model_class: str
    num_layers: int
    dtype: str
    device: str
    attention: str
    mode: str
    date: str
    versions: dict[str, str]
    tokens: int
    seed: int
    strict: bool = False
    """Whether foreign code keeps a verdict from being HEALTHY."""
    foreign: list[str] = field(default_factory=list)
    """Code in the model that is not the model's, and was trusted."""
    believed: list[str] = field(default_factory=list)
    """Facts of the model that could not be checked, such as a switch in which one layer differs from its siblings."""
    doubts: list[str] = field(default_factory=list)
    """Facts that are likely wrong but have no place; they keep a verdict from being HEALTHY."""
    not_run: list[str] = field(default_factory=list)
    """Ways to use the model that were not judged."""
    planted: dict[str, Any] | None = None
    verdict: str = "INCONCLUSIVE"
    sentence: str = ""
    layer: int | None = None
    op: str | None = None
    function: str | None = None
    after: str | None = None
    lanes: list[int] = field(default_factory=list)
    lanes_of: int | None = None
    fault_class: str | None = None
    assumption: str = ""
    not_covered: list[str] = field(default_factory=list)
    cost_forwards: float = 0.0
    """Measured: the time of all probes over the time of one plain forward."""
    notes: list[str] = field(default_factory=list)
    suspicions: list[dict[str, Any]] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    """The sums of every operator's coverage, and how many operators those are."""
    probes: list[LayerReport] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 healthy, 1 fault, 4 inconclusive."""
        return EXIT[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data; numbers that are none become null."""
        plain: dict[str, Any] = strict({"schema": SCHEMA, "kind": "diagnosis", **asdict(self)})
        for item in plain["evidence"]:
            del item["place"]
        return plain

    def save(self, path: Path) -> None:
        """Write the diagnosis as strict JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return self.sentence

"""What locate says: the verdict, what it rests on, and every probe of every layer. Imports no torch.

A verdict is FAULT only on exact evidence: results that change when nothing changed, a broken link, weights that are not
the file's, a twin with other bits, a token that changes with a later one, a value outside of its rounding interval. Tests
with a tolerance only raise a suspicion, which makes the verdict INCONCLUSIVE. HEALTHY needs the deciding probe of the
mode to have judged every layer: replay on the host, the exact twin on the device. Whatever it did not look at, or not as
closely, stands in the sentence.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
MODES = ("device", "host", "all")
PROBES = ("weights", "repeat", "links", "twin", "causal", "checksum", "replay", "batch", "decode")
EXIT = {"HEALTHY": 0, "FAULT": 1, "INCONCLUSIVE": 4}
ASSUMPTIONS = {
    "device": "the device is deterministic, and exact where IEEE arithmetic is",
    "host": "the host's arithmetic, the weights in the file and the model's code are right",
    "own": "the host's arithmetic, the weights as they are in memory and the model's code are right",
}
NOT_SEEN_BY_TWINS = (
    "gain, truncation or a stuck mantissa bit of an operator, on all channels or few",
    "a dead zone or saturation relative to a maximum, on all channels of what is added to the residual stream",
    "any deterministic fault on all channels of the MLP's gate or activation, which has no gauge",
    "an operator that computes another function with the same symmetries: another eps, a fast activation, another scale",
    "a wrong weight",
    "a fault of whole tokens that is the same for all channels: a residual row that is left out, another rotation of a token, "
    "a mask that hides what it should show",
    "anything outside of the layers that is wrong at every call: embeddings, rotation, last norm, head",
)
NOT_SEEN_IN_FEW_BITS = (
    "in this dtype: a fault on few channels that commutes with signs and powers of two, and is as small as what another "
    "order of summation changes"
)
NOT_SEEN_BY_REPLAY = (
    "an error smaller than the rounding interval of its operator",
    "an error that needs other tokens, lengths or batch sizes than these to show",
    "an error that came in none of the calls that were made",
)


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
class LayerReport:
    """All probes of one layer, or of what lies outside of the layers."""

    layer: int | None
    name: str
    results: dict[str, Result] = field(default_factory=dict)
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each operator: how many rows it made, and how many of them were judged by what."""
    statistics: dict[str, Any] | None = None


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
    sequences: int
    tokens: int
    seed: int
    strict: bool = False
    """Whether foreign code keeps a verdict from being HEALTHY."""
    foreign: list[str] = field(default_factory=list)
    """Code in the model that is not the model's, and was believed."""
    believed: list[str] = field(default_factory=list)
    """Facts of the model that nothing here can check, such as a switch that one layer has otherwise than its siblings."""
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
    device_forwards: int = 0
    """How many times the device computed every layer for it."""
    cost: dict[str, float] = field(default_factory=dict)
    detectable_rate: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    suspicions: list[dict[str, Any]] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    """The sums of every operator's coverage, and how many operators those are."""
    probes: list[LayerReport] = field(default_factory=list)
    srdd: dict[str, Any] | None = None
    evidence: list[Evidence] = field(default_factory=list)

    def decide(self, has_file: bool) -> None:
        """Reach the verdict from the probes."""
        self.assumption = ASSUMPTIONS["device" if self.mode == "device" else "host" if has_file else "own"]
        self.not_covered = list(NOT_SEEN_BY_TWINS if self.mode == "device" else NOT_SEEN_BY_REPLAY)
        if self.mode == "device" and self.dtype != "float32":
            self.not_covered.append(NOT_SEEN_IN_FEW_BITS)
        self.coverage = self._covered()
        self.suspicions = self._suspicions()
        if self.evidence:
            self._blame()
        elif self.suspicions:
            self.verdict = "INCONCLUSIVE"
            first = self.suspicions[0]
            self.sentence = f"INCONCLUSIVE: {_place(first['layer'])} is suspect ({first['probe']}: {first['text']})."
            self.sentence += " Host mode decides." if self.mode == "device" else ""
        elif gaps := self._gaps():
            self.verdict = "INCONCLUSIVE"
            self.sentence = f"INCONCLUSIVE: {_first(gaps)}; nothing that was judged is wrong."
        else:
            self.verdict = "HEALTHY"
            self.sentence = (
                f"HEALTHY: all {self.num_layers} layers compute what they should, as far as {self._seen_by()} can see"
            )
            self.sentence += self._not_replayed() + "."
            self.sentence += f" Not run: {', '.join(self.not_run)}." if self.not_run else ""
            self.sentence += f" Not checked: {'; '.join(self.believed)}." if self.believed else ""
            self.sentence += f" Code that is not the model's was believed: {_first(self.foreign)}." if self.foreign else ""

    def _seen_by(self) -> str:
        return "twins on the device" if self.mode == "device" else "a replay on the host"

    def _covered(self) -> dict[str, int]:
        operators = [counts for probe in self.probes for counts in probe.coverage.values()]
        names = dict.fromkeys(name for counts in operators for name in counts)
        return {"operators": len(operators)} | {name: sum(c.get(name, 0) for c in operators) for name in names}

    def _not_replayed(self) -> str:
        """What the deciding probe did not look at, or not as closely."""
        operators = [(op, counts) for probe in self.probes for op, counts in probe.coverage.items()]
        text = "; embeddings, rotation, last norm and head were only repeated" if self.mode == "device" else ""
        some = [counts for _, counts in operators if counts.get("checksums")]
        rows, seen = (sum(counts[key] for counts in some) for key in ("rows", "checksums"))
        text += f"; of {len(some)} products, {seen:,} of {rows:,} rows passed by checksums alone" if some else ""
        agreed = sorted({op.rpartition(":")[2] for op, counts in operators if counts.get("agreed")})
        return text + (f"; of {', '.join(agreed)} only that the host makes the same bits is known" if agreed else "")

    def _blame(self) -> None:
        """The first layer in the order of computation; there, the strongest kind of evidence."""
        strength = {"weights": 0, "replay": 1, "links": 2, "repeat": 3, "twin": 4, "causal": 5, "batch": 6, "decode": 7}
        self.evidence.sort(key=lambda e: (e.place, strength[e.probe]))
        first = self.evidence[0]
        self.verdict = "FAULT"
        self.layer, self.op, self.function, self.after = first.layer, first.op, first.function, first.after
        self.lanes, self.lanes_of, self.fault_class = first.lanes, first.lanes_of, first.fault_class
        unstable = next((e for e in self.evidence if e.place == first.place and e.probe == "repeat"), None)
        if unstable is not None:
            self.fault_class = unstable.fault_class
        where = self.op or ("output" if self.layer is not None else "the model")
        function = " ".join(part for part in (self.function, f"after {self.after}" if self.after else "") if part)
        where += f" ({function})" if function else ""
        self.sentence = f"FAULT: {_place(self.layer)}, {where}: {self._channels()}{first.text} ({self.fault_class})."
        self.sentence += self._also_faulty()

    def _also_faulty(self) -> str:
        """Where else there is evidence; four layers by name."""
        others = list(dict.fromkeys(e.layer for e in self.evidence if e.layer != self.layer))
        named = [layer for layer in others if layer is not None][:4]
        words = f"layer{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}" if named else ""
        left = len(others) - len(named)
        if not named or (left == 1 and None in others):
            words += (" and " if named else "") + "outside of the layers" if None in others else ""
        elif left:
            words += f" and {left} more places"
        return f" Also faulty: {words}." if others else ""

    def _channels(self) -> str:
        if not self.lanes or not self.lanes_of:
            return ""
        some = f"{len(self.lanes):,} of {self.lanes_of:,}" if len(self.lanes) < self.lanes_of else f"all {self.lanes_of:,}"
        return f"{some} channels are wrong; "

    def _suspicions(self) -> list[dict[str, Any]]:
        return [
            {"layer": p.layer, "probe": name, "text": r.reason}
            for p in self.probes
            for name, r in p.results.items()
            if r.status == "suspect" and not (name == "checksum" and p.results.get("replay", r).status == "pass")
        ]

    def _gaps(self) -> list[str]:
        """Layers that the deciding probe of the mode could not judge."""
        deciding = "twin" if self.mode == "device" else "replay"
        gaps = list(self.doubts)
        for p in self.probes:
            for name in (deciding, "repeat", "weights"):
                result = p.results.get(name)
                if result is None and name == deciding and p.layer is not None:
                    gaps.append(f"{_place(p.layer)} was not judged by {name}")
                if result is not None and result.status == "inconclusive":
                    gaps.append(f"{_place(p.layer)}, {name}: {result.reason}")
        gaps += [f"{code} is not the model's code" for code in self.foreign] if self.strict else []
        return gaps if self.probes else ["nothing was probed"]

    @property
    def exit_code(self) -> int:
        """Of the command: 0 healthy, 1 fault, 4 inconclusive."""
        return EXIT[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data; numbers that are none become null."""
        plain: dict[str, Any] = _plain({"schema": SCHEMA, "kind": "diagnosis", **asdict(self)})
        for item in plain["evidence"]:
            del item["place"]
        return plain

    def to_json(self) -> str:
        """The diagnosis as strict JSON."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        """Write the diagnosis as JSON."""
        path.write_text(self.to_json(), encoding="utf-8")

    def __str__(self) -> str:
        return self.sentence


def _place(layer: int | None) -> str:
    return "outside of the layers" if layer is None else f"layer {layer}"


def _first(items: list[str]) -> str:
    """The first, and how many more."""
    return items[0] + (f" and {len(items) - 1} more" if len(items) > 1 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

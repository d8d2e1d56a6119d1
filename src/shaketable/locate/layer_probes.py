"""The probes of locate: each is a function that looks at one part of the model and returns a finding.

A part is one decoder layer, or everything outside of the layers. `LAYER_PROBES` and `OUTSIDE_PROBES` list the probes in the
order in which they run; a later one may read what an earlier one found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import Recording, channels, differing, main_result, same
from shaketable.capture.reference import Reference, sets_attribute
from shaketable.capture.trace import LayerCall, Trace, record_layer
from shaketable.errors import ShaketableError
from shaketable.locate import twins
from shaketable.locate.diagnosis import Evidence, LayerReport, Result
from shaketable.locate.replay import Violation, judge, rows_of
from shaketable.locate.twins import Circuit, circuit_of, gauged
from shaketable.numerics.classify import fault_class, unstable_class
from shaketable.numerics.intervals import Precision
from shaketable.numerics.operators import WITHOUT_VALUES
from shaketable.sites.nested_tensors import tensors_of

EXAMPLES = 6
BY_DESIGN = ("index_add_", "index_add", "scatter_add", "scatter_add_", "index_put_", "histc", "bincount", "cumsum")
"""Functions that accelerators may compute with atomic additions."""
RETRIES = 24
"""Further calls of a layer whose results change, to see which operator changes."""
USES = {"batch": "a batch of two", "decode": "cached decoding"}
UNSTABLE = "the layer's results change from call to call"


@dataclass
class Finding:
    """The result of one probe of a part, with its evidence."""

    result: Result
    evidence: list[Evidence] = field(default_factory=list)
    coverage: dict[str, dict[str, int]] | None = None
    """For each operator: the number of rows it made, and how many of them were judged in which way."""


def passed() -> Finding:
    """Nothing is wrong."""
    return Finding(Result("pass", 0.0))


def failed(evidence: list[Evidence], share: float) -> Finding:
    """The first piece of evidence is reported; `share` of the values are wrong."""
    return Finding(Result("fail", share, evidence[0].op, evidence[0].text), evidence)


def unknown(reason: str, score: float | None = None, op: str | None = None) -> Finding:
    """The probe cannot judge this part."""
    return Finding(Result("inconclusive", score, op, reason))


@dataclass
class ProbedPart:
    """One decoder layer, or everything outside of the layers, with what probes need to know."""

    model: nn.Module
    reference: Reference
    precision: Precision
    seed: int
    recording: Recording
    traced: Trace
    call: LayerCall | None
    """The layer's call in the trace; None outside of the layers."""
    uses: dict[str, Trace] = field(default_factory=dict)
    """The model run in the other ways of `USES`."""
    logits: list[Tensor] = field(default_factory=list)
    """Logits of plain forwards."""
    evidence: list[Evidence] = field(default_factory=list)
    index: int | None = field(init=False)
    """The layer's index; None outside of the layers."""
    prefix: str = field(init=False)
    """The layer's path in the model."""
    module: nn.Module = field(init=False)
    """The layer, or the model."""
    others: set[str] = field(init=False)
    """Paths of modules that are judged as parts of their own."""
    report: LayerReport = field(init=False)

    def __post_init__(self) -> None:
        call = self.call
        self.index, self.prefix, self.module = (None, "", self.model) if call is None else (call.index, call.name, call.module)
        self.others = {one.name for one in self.traced.calls} if call is None else set()
        self.report = LayerReport(self.index, self.prefix)

    @property
    def layer(self) -> LayerCall:
        """The call, for probes of layers only."""
        assert self.call is not None
        return self.call

    @functools.cached_property
    def circuit(self) -> Circuit | str:
        """The layer's wiring; or why its symmetries are not known, for instance because a block has another class."""
        expected, own = self.reference.expected[self.prefix], dict(self.module.named_modules())
        for path, part in expected.named_modules():
            if (kind := type(own.get(path))) is not type(part):
                where = f"{self.prefix}.{path}".rstrip(".")
                return f"{where} is a {kind.__name__} where the config makes a {type(part).__name__}"
        return circuit_of(expected, getattr(self.model, "config", None))

    def status(self, probe: str) -> str:
        """Status of an earlier probe; empty when it did not run."""
        return self.report.results[probe].status if probe in self.report.results else ""

    def take(self, name: str, finding: Finding) -> None:
        """Keep a finding."""
        self.report.results[name] = finding.result
        for item in finding.evidence if name not in USES else ():
            item.place = self.place(item, self.recording)
        self.evidence += finding.evidence
        if finding.coverage is not None:
            self.report.coverage = finding.coverage

    def place(self, item: Evidence, recording: Recording) -> float:
        """In the order of computation: the layer's index; outside of the layers, before or after them."""
        if self.index is not None:
            return self.index
        last = max(i for i, r in enumerate(recording.records) if r.path in self.others)
        orders = {r.path: i for i, r in enumerate(recording.records)}
        by_link = item.probe == "links" and recording.breaks
        is_late = recording.breaks[0].after > last if by_link else orders.get(item.op or "", last + 1) > last
        return len(self.others) if is_late else -1


# ---- weights, attributes and buffers


def weights(part: ProbedPart) -> Finding:
    """The device's weights against the file's, bit for bit; attributes and buffers against those that the config gives."""
    evidence, worst, own = [], 0.0, ""
    names = [f"{part.prefix}.{name}".lstrip(".") for name, _ in part.module.named_parameters()]
    inside = tuple(f"{path}." for path in part.others)
    for name in names if part.reference.has_file else ():
        if inside and name.startswith(inside):
            continue
        got, expected = part.model.get_parameter(name).detach().cpu(), part.reference.weight(name)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        differs = got.contiguous().view(bits) != expected.contiguous().view(bits)
        if not bool(differs.any()):
            continue
        path, _, parameter = name.rpartition(".")
        if sets_attribute(type(part.model.get_submodule(path)), parameter):
            own = own or f"{name} is not the file's, and its module's own code sets it"
            continue
        worst = max(worst, float(differs.double().mean()))
        rows = (differs.flatten(1).any(1) if differs.dim() > 1 else differs).nonzero().flatten().tolist()
        examples = [
            {"index": str(at), "got": float(got[at]), "low": float(expected[at]), "high": float(expected[at])}
            for at in map(tuple, differs.nonzero()[:EXAMPLES].tolist())
        ]
        text = f"{int(differs.sum()):,} of {got.numel():,} values of its {parameter} are not those of the file"
        op = path.removeprefix(f"{part.prefix}.")
        evidence.append(Evidence(part.index, op, None, "weights", text, "weight", rows, differs.shape[0], examples))
    wrong = list(part.reference.unlike(part.module, part.prefix, part.others))
    if certain := [one for one in wrong if one.status == "wrong"]:
        first = certain[0]
        found = Evidence(part.index, first.path or None, None, "weights", first.text, "attribute")
        return failed([*evidence, found], worst if evidence else 1.0)
    if evidence:
        return failed(evidence, worst)
    if values := [one for one in wrong if one.status == "own"]:
        where = values[0].path or part.prefix or "the model"
        text = f"{where}: {values[0].text}; it may be trained, a cache, or rounded otherwise"
        return unknown(text, 1.0, values[0].path or None)
    if own:
        return unknown(own)
    return passed() if part.reference.has_file else Finding(Result("skipped", reason="no file to compare with"))


# ---- the same call again


def repeat(part: ProbedPart) -> Finding:
    """The same call again: every bit must come back. The first operator that changes is named."""
    first, second = part.layer.y, main_result(part.recording.output)
    if same(first, second):
        return passed()
    order, a, b = next((found for _ in range(RETRIES) if (found := _first_change(part)) is not None), (None, first, second))
    record = None if order is None else part.recording.records[order]
    path, function = (record.path, record.function) if record else ("", None)
    share = float((first != second).double().mean())
    text = f"{share:.1%} of the layer's results change from call to call"
    if function in BY_DESIGN:
        return unknown(f"{text}: {function} adds in any order, by design", share, path or None)
    after = part.recording.part_before(order) if order is not None and not path else None
    kind, lanes, size = unstable_class(a, b), channels(a != b), a.shape[-1]
    return failed([Evidence(part.index, path or None, function, "repeat", text, kind, lanes, size, after=after)], share)


def _first_change(part: ProbedPart) -> tuple[int, Tensor, Tensor] | None:
    """The first operator whose result differs in another recording of the same call."""
    again = record_layer(part.layer, part.reference).records
    for order, (r, s) in enumerate(zip(part.recording.records, again, strict=False)):
        if r.function in WITHOUT_VALUES:
            continue
        for a, b in zip(tensors_of(r.output), tensors_of(s.output), strict=False):
            if a.shape == b.shape and not same(a, b):
                return order, a, b
    return None


def repeat_logits(part: ProbedPart) -> Finding:
    """Three whole forwards. A difference is found in its layer, or nowhere."""
    logits = part.traced.logits
    others = [one for one in part.logits if not same(one, logits)]
    if not others:
        return passed()
    differs = torch.stack([differing(one, logits) for one in others]).any(0)
    rows = int(differs.reshape(-1, differs.shape[-1]).any(1).sum())
    text = f"three forwards of the whole model differ in the logits of {rows} of {differs.shape[-2]} tokens"
    return Finding(Result("suspect", float(differs.double().mean()), reason=text))


def links(part: ProbedPart, recording: Recording | None = None) -> Finding:
    """Every operator is given exactly what the operators before it made."""
    recording = recording or part.recording
    if not recording.breaks:
        return passed()
    first = recording.breaks[0]
    differs = first.expected != first.got
    text = f"the {first.side} of {first.path or 'the layer'} is not what was made for it"
    got, where = first.got.detach().cpu(), differs.cpu()
    expected = first.expected.detach().cpu()[where]
    kind = fault_class(got, expected, expected, where)
    found = Evidence(part.index, first.path or None, None, "links", text, kind, channels(differs), differs.shape[-1])
    return failed([found], float(differs.double().mean()))


# ---- on the device


def twin(part: ProbedPart) -> Finding:
    """The layer with other, equivalent weights must return the same bits."""
    if part.status("repeat") != "pass":
        return unknown(UNSTABLE)
    if isinstance(circuit := part.circuit, str):
        return unknown(circuit)
    if part.traced.has_past:
        return unknown("the layer is given keys and values, which cannot be transformed with the weights")
    powers = part.layer.x.dtype != torch.float16
    found, other = _in_gauge(part, circuit, powers)
    if found is not None and powers and not (twins.stays_normal(part.recording) and twins.stays_normal(other)):
        found, other = _in_gauge(part, circuit, powers=False)
    compared = {
        record.path: {"rows": rows, "twin": rows}
        for record in part.recording.records
        if record.func is None and record.path in twins.MODULES and (rows := rows_of(next(tensors_of(record.output))))
    }
    if found is None:
        return Finding(Result("pass", 0.0), coverage=compared)
    text = f"a twin differs in {found.share:.1%} of the values"
    size = part.layer.x.shape[-1] if found.path is None else None
    evidence = Evidence(part.index, found.path, None, "twin", text, "asymmetric", found.lanes, size, after=found.after)
    return Finding(Result("fail", found.share, found.path, text), [evidence], compared)


def _in_gauge(part: ProbedPart, circuit: Circuit, powers: bool) -> tuple[twins.TwinDifference | None, Recording]:
    call = part.layer
    gauge = twins.draw_gauge(circuit, part.seed * 1000 + call.index, powers)
    with gauged(call.module, gauge):
        other = record_layer(call, part.reference, call.x * gauge["stream"].to(call.x))
    return twins.first_difference(gauge, part.recording, other), other


def causal(part: ProbedPart) -> Finding:
    """One token in the middle changes: the tokens before it must keep every bit, as a causal mask hides it from them."""
    if part.status("repeat") != "pass":
        return unknown(UNSTABLE)
    circuit, call = part.circuit, part.layer
    if isinstance(circuit, str):
        return unknown(circuit)
    if not circuit.is_causal:
        return Finding(Result("skipped", reason="this attention is not causal"))
    middle = call.x.shape[1] // 2
    x = call.x.clone()
    x[:, middle] = -x[:, middle]
    other = record_layer(call, part.reference, x)
    before, after = twins.until(part.recording, middle), twins.until(other, middle)
    found = twins.first_difference(circuit.same_basis(), before, after)
    if found is None:
        return passed()
    text = f"tokens before {middle} change when token {middle} does, which they must not see"
    return failed([Evidence(part.index, found.path, None, "causal", text, "leak", found.lanes, after=found.after)], found.share)


# ---- on the host


def replay(part: ProbedPart) -> Finding:
    """Every operator inside of its rounding interval."""
    judgement = judge(part.recording, part.reference, part.prefix, part.precision, part.others)
    finding = _judged(part, judgement.violations, judgement.unknown, part.recording)
    if finding.result.status == "pass" and part.status("repeat") == "fail" and part.layer.x.device.type != "cpu":
        again = part.report.results["repeat"]  # an accelerator may sum in another order at every call
        again.status, again.reason = "inconclusive", f"{again.reason}, each to what a correct device may return"
        part.evidence[:] = [e for e in part.evidence if e.probe != "repeat"]
    finding.coverage = judgement.coverage
    return finding


def in_use(part: ProbedPart, name: str) -> Finding | None:
    """Replay in a batch or while decoding; only where nothing is wrong so far, and the model can be run like that."""
    if name not in part.uses or part.status("replay") != "pass" or any(e.probe not in USES for e in part.evidence):
        return None
    traced = part.uses[name]
    call = None if part.index is None else traced.calls[part.index]
    recording = traced.outside if call is None else record_layer(call, part.reference)
    judgement = judge(recording, part.reference, part.prefix, part.precision, part.others)
    finding = _judged(part, judgement.violations, judgement.unknown, recording)
    evidence = [*links(part, recording).evidence, *finding.evidence]
    for item in evidence:
        item.place = part.place(item, recording)
        item.probe, item.text = name, f"in {USES[name]}, {item.text}"
    if evidence:
        finding = Finding(Result("fail", 1.0, evidence[-1].op, evidence[-1].text), evidence)
    if call is not None and part.status("repeat") == "pass" and not same(call.y, main_result(recording.output)):
        finding.result = Result("suspect", 1.0, reason=f"in {USES[name]}, {UNSTABLE}")
    return finding


def _judged(part: ProbedPart, violations: list[Violation], unjudged: dict[str, str], recording: Recording) -> Finding:
    evidence = [_violation(v, recording, part.index) for v in violations]
    if evidence:
        return failed(evidence, max(v.share for v in violations))
    if unjudged:
        label, reason = next(iter(unjudged.items()))
        return unknown(f"{label}{f' and {len(unjudged) - 1} more' if len(unjudged) > 1 else ''}: {reason}")
    return passed()


def _violation(v: Violation, recording: Recording, layer: int | None) -> Evidence:
    text = f"{int(v.outside.sum()):,} of {v.got.numel():,} values lie outside of their rounding interval"
    kind = fault_class(v.got, v.low, v.high, v.outside)
    size = v.got.shape[-1] if v.got.dim() else 1
    after = recording.part_before(v.order) if layer is not None and not v.path else None
    return Evidence(layer, v.path or None, v.function, "replay", text, kind, channels(v.outside), size, _examples(v), after)


def _examples(v: Violation) -> list[dict[str, Any]]:
    """The worst values, with what was allowed."""
    got, low, high = v.got[v.outside].double(), v.low.double(), v.high.double()
    far = torch.maximum(low - got, got - high).nan_to_num(nan=float("inf"))
    places = v.outside.nonzero()
    found = []
    for i in far.argsort(descending=True)[:EXAMPLES].tolist():
        place = [0, 0, *places[i].tolist()]
        ends = {"got": float(got[i]), "low": float(low[i]), "high": float(high[i])}
        found.append({"token": place[-2], "channel": place[-1], **ends})
    return found


# ---- the lists


@dataclass(frozen=True)
class Probe:
    """One probe: its name, its function, and in which modes it runs."""

    name: str
    work: Callable[[ProbedPart], Finding | None]
    modes: tuple[str, ...]
    calls: str = ""
    """The thing that the probe calls with other arguments than the model; if that raises, the part is inconclusive."""

    def run(self, part: ProbedPart) -> Finding | None:
        """The finding; None where the probe does not apply."""
        if not self.calls:
            return self.work(part)
        try:
            return self.work(part)
        except FAILURES as error:
            return unknown(failure(self.calls, error))


FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""Errors of a layer that is called with other arguments than its model gives; full memory is not one of them."""


def failure(called: str, error: Exception) -> str:
    """Why something could not be called, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if isinstance(error, ShaketableError):
        return str(error)
    return f"{called} cannot be called: {next(iter(str(error).splitlines()), type(error).__name__)}"


ON_HOST, ON_DEVICE = ("host", "all"), ("device", "all")
ALWAYS = ("device", "host", "all")
_IN_USES = tuple(Probe(name, functools.partial(in_use, name=name), ON_HOST, "the layer") for name in USES)
LAYER_PROBES = (
    Probe("weights", weights, ON_HOST),
    Probe("repeat", repeat, ALWAYS),
    Probe("links", links, ALWAYS),
    Probe("twin", twin, ON_DEVICE, "the twin"),
    Probe("replay", replay, ON_HOST),
    *_IN_USES,
    Probe("causal", causal, ("device",), "the layer with another token"),
)
OUTSIDE_PROBES = (
    Probe("weights", weights, ON_HOST),
    Probe("repeat", repeat_logits, ALWAYS),
    Probe("links", links, ALWAYS),
    Probe("replay", replay, ON_HOST),
    *_IN_USES,
)

"""The probes of one layer: each takes the layer's call and its recording, and gives a result and, if it fails, evidence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from shaketable.capture.recorder import Recording, main_result, same
from shaketable.capture.reference import Reference, sets_attribute
from shaketable.capture.trace import LayerCall, record_layer
from shaketable.locate import twins
from shaketable.locate.diagnosis import Evidence, Result
from shaketable.locate.replay import Judgement, Violation, rows_of
from shaketable.locate.twins import Circuit, Gauge, gauged
from shaketable.numerics.classify import fault_class, unstable_class
from shaketable.numerics.intervals import Precision, tolerance
from shaketable.sites.nested_tensors import tensors_of

Finding = tuple[Result, list[Evidence]]
EXAMPLES = 6
BY_DESIGN = ("index_add_", "index_add", "scatter_add", "scatter_add_", "index_put_", "histc", "bincount", "cumsum")
"""Functions that accelerators may compute with atomic additions."""
PATIENCE = 24
"""How often a layer whose results change is called again to see which operator changes."""


@dataclass(frozen=True)
class Bench:
    """What every probe needs to know."""

    reference: Reference
    precision: Precision
    seed: int


def weights(names: list[str], model: torch.nn.Module, bench: Bench, layer: int | None, prefix: str) -> Finding:
    """The device's weights against the file's, bit for bit."""
    if not bench.reference.has_file:
        return Result("skipped", reason="no file to compare with"), []
    evidence, worst, own = [], 0.0, ""
    for name in names:
        got, expected = model.get_parameter(name).detach().cpu(), bench.reference.weight(name)
        if not torch.equal(_bits(got), _bits(expected)):
            path, _, parameter = name.rpartition(".")
            if sets_attribute(type(model.get_submodule(path)), parameter):
                own = own or f"{name} is not the file's, and its module's own code sets it"
                continue
            differs = _bits(got) != _bits(expected)
            worst = max(worst, float(differs.double().mean()))
            evidence.append(_weight_evidence(name, got, expected, differs, layer, prefix))
    if not evidence:
        return Result("inconclusive", reason=own) if own else Result("pass", 0.0), []
    return Result("fail", worst, evidence[0].op, evidence[0].text), evidence


def _weight_evidence(name: str, got: Tensor, expected: Tensor, differs: Tensor, layer: int | None, prefix: str) -> Evidence:
    op, _, own = name.removeprefix(f"{prefix}.").rpartition(".")
    rows = differs.flatten(1).any(1) if differs.dim() > 1 else differs
    lanes: list[int] = rows.nonzero().flatten().tolist()
    places = differs.nonzero()[:EXAMPLES].tolist()
    examples = [
        {
            "index": str(tuple(p)),
            "got": float(got[tuple(p)]),
            "low": float(expected[tuple(p)]),
            "high": float(expected[tuple(p)]),
        }
        for p in places
    ]
    text = f"{int(differs.sum()):,} of {got.numel():,} values of its {own} are not those of the file"
    return Evidence(layer, op, None, "weights", text, "weight", lanes, differs.shape[0], examples)


def attributes(
    so_far: Result, module: torch.nn.Module, prefix: str, bench: Bench, layer: int | None, skip: Collection[str] = ()
) -> Finding:
    """Numbers and buffers of the modules (scales, frequencies) against those that the config gives."""
    wrong = list(bench.reference.other_numbers(module, prefix, skip))
    if not wrong:
        own = next(bench.reference.own_numbers(module, prefix, skip), None)
        if own is None or so_far.status == "fail":
            return so_far, []
        where, text = own
        return Result(
            "inconclusive", 1.0, where or None, f"{where or prefix or 'the model'}: {text}; it may be trained, or a cache"
        ), []
    path, text = wrong[0]
    found = Evidence(layer, path or None, None, "weights", text, "attribute")
    return (so_far if so_far.status == "fail" else Result("fail", 1.0, path or None, text)), [found]


def _bits(tensor: Tensor) -> Tensor:
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size)


def repeat(call: LayerCall, recording: Recording, bench: Bench) -> Finding:
    """The same call again: every bit must come back."""
    first, second = call.y, main_result(recording.output)
    if same(first, second):
        return Result("pass", 0.0), []
    share = float((first != second).double().mean())
    order, a, b = _first_change(call, recording, bench, second)
    path, function = ("", None) if order is None else (recording.records[order].path, recording.records[order].function)
    text = f"{share:.1%} of the layer's results change from call to call"
    if function in BY_DESIGN:
        return Result("inconclusive", share, path or None, f"{text}: {function} adds in any order, by design"), []
    differs = a != b
    kind, size = unstable_class(a, b), differs.shape[-1]
    after = recording.part_before(order) if order is not None and not path else None
    evidence = Evidence(call.index, path or None, function, "repeat", text, kind, _lanes(differs), size, after=after)
    return Result("fail", share, path or None, text), [evidence]


def is_within_summation(call: LayerCall, recording: Recording, bench: Bench) -> bool:
    """Whether two results of the same call differ by no more than another order of summation explains."""
    return _beyond(call.y, main_result(recording.output), call.x, bench.precision) <= 1


def _first_change(call: LayerCall, one: Recording, bench: Bench, y: Tensor) -> tuple[int | None, Tensor, Tensor]:
    """The first operator whose result differs between two recordings of the same call; a rare fault needs a few calls."""
    for _ in range(PATIENCE):
        two = record_layer(call, bench.reference)
        for order, (r, s) in enumerate(zip(one.records, two.records, strict=False)):
            for a, b in zip(tensors_of(r.output), tensors_of(s.output), strict=False):
                if a.shape == b.shape and not same(a, b):
                    return order, a, b
    return None, call.y, y


def links(layer: int | None, recording: Recording) -> Finding:
    """What one operator made is what the next one gets."""
    if recording.breaks:
        first = recording.breaks[0]
        differs = first.expected != first.got
        text = f"the {first.door} of {first.path or 'the layer'} is not what was made for it"
        low = high = first.expected.detach().cpu()[differs.cpu()]
        kind = fault_class(first.got.detach().cpu(), low, high, differs.cpu())
        lanes = _lanes(differs)
        found = Evidence(layer, first.path or None, None, "links", text, kind, lanes, differs.shape[-1])
        return Result("fail", float(differs.double().mean()), first.path or None, text), [found]
    return Result("pass", 0.0), []


def twin(call: LayerCall, recording: Recording, circuit: Circuit | str, bench: Bench) -> tuple[Finding, bool]:
    """The layer in another gauge: the same bits must come back. Also says whether powers of two were used."""
    if isinstance(circuit, str):
        return (Result("inconclusive", reason=circuit), []), False
    powers = call.x.dtype != torch.float16
    found, other = _in_gauge(call, recording, circuit, bench, powers)
    if found is not None and powers and not (twins.stays_normal(recording) and twins.stays_normal(other)):
        powers = False
        found, other = _in_gauge(call, recording, circuit, bench, powers)
    if found is None:
        return (Result("pass", 0.0), []), powers
    text = f"a twin in another gauge differs in {found.share:.1%} of the values"
    size = call.x.shape[-1] if found.path is None else None
    evidence = Evidence(call.index, found.path, None, "twin", text, "asymmetric", found.lanes, size, after=found.after)
    return (Result("fail", found.share, found.path, text), [evidence]), powers


def _in_gauge(
    call: LayerCall, recording: Recording, circuit: Circuit, bench: Bench, powers: bool
) -> tuple[twins.TwinDifference | None, Recording]:
    gauge = twins.draw_gauge(circuit, bench.seed * 1000 + call.index, powers)
    with gauged(call.module, circuit, gauge):
        other = record_layer(call, bench.reference, call.x * gauge.spaces["stream"].to(call.x))
    return twins.first_difference(circuit, gauge, recording, other), other


def causal(call: LayerCall, recording: Recording, circuit: Circuit | str, bench: Bench) -> Finding:
    """One token in the middle changes: the tokens before it must keep every bit, as a causal mask hides it from them."""
    if isinstance(circuit, str):
        return Result("inconclusive", reason=circuit), []
    if circuit.routed or not circuit.causal:
        reason = "experts compute other groups of tokens then" if circuit.routed else "this attention is not causal"
        return Result("skipped", reason=reason), []
    middle = call.x.shape[1] // 2
    x = call.x.clone()
    x[:, middle] = -x[:, middle]
    other = record_layer(call, bench.reference, x)
    same_basis = Gauge({name: torch.ones(size) for name, size in circuit.sizes.items()})
    found = twins.first_difference(circuit, same_basis, twins.until(recording, middle), twins.until(other, middle))
    if found is None:
        return Result("pass", 0.0), []
    text = f"tokens before {middle} change when token {middle} does, which they must not see"
    evidence = Evidence(call.index, found.path, None, "causal", text, "leak", found.lanes, after=found.after)
    return Result("fail", found.share, found.path, text), [evidence]


def _beyond(a: Tensor, b: Tensor, x: Tensor, precision: Precision) -> float:
    """The largest difference of two results of one layer, over κ·(u(|x| + |y|) + 4u·rms(y − x))."""
    kappa, unit = tolerance(precision, a.dtype)
    y, z, given = a.float(), b.float(), x.float()
    change = (y - given).square().mean(-1, keepdim=True).sqrt()
    allowed = kappa * unit * (given.abs() + y.abs() + 4 * change)
    worst = ((y - z).abs() / allowed.clamp_min(1e-30)).nan_to_num(nan=float("inf")).max()
    return float(worst)


def checksum(scores: dict[str, float]) -> Result:
    """Sums of products: a screen."""
    path = max(scores, key=lambda p: scores[p], default=None)
    worst = 0.0 if path is None else scores[path]
    if worst <= 1:
        return Result("pass", worst)
    return Result("suspect", worst, path, f"a checksum is off by {worst:.3g} times its threshold")


def by_checksums(recording: Recording, passed: Collection[str]) -> dict[str, dict[str, int]]:
    """What the products that passed by checksums have made."""
    return {
        record.path: {"rows": rows, "replayed": 0, "checksums": rows}
        for record in recording.records
        if record.func is None and record.path in passed and (rows := rows_of(next(tensors_of(record.output))))
    }


def by_twin(recording: Recording, circuit: Circuit) -> dict[str, dict[str, int]]:
    """What the operators that a twin compares have made: all of it is compared."""
    return {
        record.path: {"rows": rows, "twin": rows}
        for record in recording.records
        if record.func is None and record.path in circuit.outputs() and (rows := rows_of(next(tensors_of(record.output))))
    }


def replay(judgement: Judgement, recording: Recording, layer: int | None) -> Finding:
    """Every operator inside of its rounding interval."""
    evidence = [_violation(v, recording, layer) for v in judgement.violations]
    if evidence:
        first = evidence[0]
        worst = max(v.share for v in judgement.violations)
        return Result("fail", worst, first.op, first.text), evidence
    if judgement.unknown:
        label, reason = next(iter(judgement.unknown.items()))
        more = f" and {len(judgement.unknown) - 1} more" if len(judgement.unknown) > 1 else ""
        return Result("inconclusive", reason=f"{label}{more}: {reason}"), []
    return Result("pass", 0.0), []


def _violation(v: Violation, recording: Recording, layer: int | None) -> Evidence:
    text = f"{int(v.outside.sum()):,} of {v.got.numel():,} values lie outside of their rounding interval"
    kind = fault_class(v.got, v.low, v.high, v.outside)
    size = v.got.shape[-1] if v.got.dim() else 1
    after = recording.part_before(v.order) if layer is not None and not v.path else None
    return Evidence(layer, v.path or None, v.function, "replay", text, kind, v.lanes, size, _examples(v), after)


def _examples(v: Violation) -> list[dict[str, float | int]]:
    """The worst values, with what was allowed."""
    got, low, high = v.got[v.outside].double(), v.low.double(), v.high.double()
    far = torch.maximum(low - got, got - high).nan_to_num(nan=float("inf"))
    places = v.outside.nonzero()
    found = []
    for i in far.argsort(descending=True)[:EXAMPLES].tolist():
        place = [0, 0, *places[i].tolist()]
        token = place[-2] if v.tokens is None else v.tokens[place[-2]]
        found.append({"token": token, "channel": place[-1], "got": float(got[i]), "low": float(low[i]), "high": float(high[i])})
    return found


def _lanes(differs: Tensor) -> list[int]:
    lanes: list[int] = differs.reshape(-1, differs.shape[-1]).any(0).nonzero().flatten().tolist()
    return lanes

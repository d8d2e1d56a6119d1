"""Gauge twins: ask the device for the same function with other numbers.

Each space of a layer's circuit gets a new basis. Signs and powers of two are exact in IEEE arithmetic: every product,
sum, rounding and norm of the twin is the original's with a sign or an exponent changed, so a healthy device must return
the same bits, and the tolerance is zero.

Which bases there are is told by `gauge.py`. Powers of two are used only where every value of the call and of its twin stays
normal, which is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shaketable.capture.recorder import Recording, main_result, same
from shaketable.locate.gauge import Gauge, free_spaces, gauge_of, paired
from shaketable.locate.wiring import Circuit
from shaketable.sites.nested_tensors import map_tensors, tensors_of

LARGEST_EXPONENT = 3


def draw_gauge(circuit: Circuit, seed: int, powers: bool) -> Gauge:
    """Random signs, and powers of two if asked, for every space that has that freedom."""
    draw = _TwinDraw(seed, powers)
    kinds = {n.kind for n in circuit.norms}
    size = circuit.sizes["stream"]
    scaled = any(n.writes == "stream" for n in circuit.norms)
    signs = draw.one().expand(size) if "layernorm" in kinds else draw.signs(size)
    stream = signs if scaled else signs * draw.power()
    factors = {space: draw.factors(circuit.sizes[space]) for space in free_spaces(circuit) if space != "k"}
    inner = _TwinDraw(seed + 1, powers and not circuit.head_norms)
    heads = range(circuit.sizes["k"] // circuit.head)
    factors["k"] = torch.cat([paired(inner.factors(circuit.head), circuit.rotary) for _ in heads])
    return gauge_of(circuit, factors, stream)


class _TwinDraw:
    """Factors from a generator of their own."""

    def __init__(self, seed: int, powers: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.powers = powers

    def signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=self.generator).float() * 2 - 1

    def one(self) -> Tensor:
        return -torch.ones(1)

    def power(self) -> float:
        return 2.0**LARGEST_EXPONENT if self.powers else 1.0

    def factors(self, n: int) -> Tensor:
        signs = self.signs(n)
        if not self.powers:
            return signs
        exponents = torch.randint(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1, (n,), generator=self.generator)
        return signs * torch.exp2(exponents.float())


# ---- comparing


@dataclass(frozen=True)
class TwinDifference:
    """The first place where a twin disagrees with the original."""

    path: str | None
    """The leaf; the module around when functions between leaves disagree; None for the layer's own additions."""
    share: float
    lanes: list[int]
    after: str | None = None
    """For the layer's own additions: the part of the layer that is added."""


def first_difference(circuit: Circuit, gauge: Gauge, original: Recording, twin: Recording) -> TwinDifference | None:
    """Compare leaf by leaf, in the order of computation. A leaf whose input differs already is not to blame: what lies
    between it and the leaves before it is."""
    reads, writes = circuit.inputs(), circuit.outputs()
    partners = {r.path: r for r in twin.records if r.func is None}
    last: str | None = None
    for record in original.records:
        other = partners.get(record.path)
        if record.func is not None or other is None or record.path not in writes:
            continue
        found = _compare(next(tensors_of(record.output)), next(tensors_of(other.output)), writes[record.path], gauge)
        if found is not None:
            given, twin_given = _tensor(record.args, record.kwargs), _tensor(other.args, other.kwargs)
            earlier = _compare(given, twin_given, (reads[record.path],), gauge)
            if earlier is None:
                return TwinDifference(record.path, *found)
            return TwinDifference(_between(record.path), *earlier, None if _between(record.path) else last)
        last = record.path.partition(".")[0]
    found = _compare(main_result(original.output), main_result(twin.output), ("stream",), gauge)
    return None if found is None else TwinDifference(None, *found, last)


def until(recording: Recording, token: int) -> Recording:
    """What the leaves took and gave, of the tokens before one."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :token] if tensor.dim() == 3 else tensor

    leaves = [r for r in recording.records if r.func is None]
    records = [replace(r, args=map_tensors(r.args, cut), kwargs={}, output=map_tensors(r.output, cut)) for r in leaves]
    return Recording(records, [], map_tensors(recording.output, cut))


def _tensor(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    return next(tensors_of((args, kwargs)))


def _between(path: str) -> str | None:
    """Who computes what a leaf reads: the module that holds it; the layer itself for its own norms."""
    return path.rpartition(".")[0] or None


def _compare(a: Tensor, b: Tensor, spaces: tuple[str, ...], gauge: Gauge) -> tuple[float, list[int]] | None:
    factor = torch.cat([gauge.spaces[s] for s in spaces]).to(a)
    expected = a * factor
    if same(expected, b):
        return None
    differs = ~((expected == b) | (expected.isnan() & b.isnan()))
    lanes: list[int] = differs.reshape(-1, differs.shape[-1]).any(0).nonzero().flatten().tolist()
    return float(differs.double().mean()), lanes


def stays_normal(recording: Recording) -> bool:
    """Whether every value that leaves take and give has room for a few powers of two on both sides."""
    leaves = [r for r in recording.records if r.func is None]
    tensors = {id(t): t for r in leaves for t in tensors_of((r.args, r.kwargs, r.output)) if t.is_floating_point()}
    return all(_has_room(t) for t in tensors.values())


def _has_room(tensor: Tensor) -> bool:
    info = torch.finfo(tensor.dtype)
    size = tensor.detach().abs()
    size = size[size != 0]
    if not size.numel():
        return True
    low, high = float(size.min()), float(size.max())
    return low >= info.tiny * 2.0**12 and high <= info.max / 2.0**12

"""Gauge twins: ask the device for the same function with other numbers.

Each space of a layer's circuit gets a new basis. Signs and powers of two are exact in IEEE arithmetic: every product,
sum, rounding and norm of the twin is the original's with a sign or an exponent changed, so a healthy device must return
the same bits, and the tolerance is zero. A permutation changes the order in which sums are taken, and a larger
companion in the batch changes how a kernel cuts up its work: those need a tolerance, and only raise a suspicion.

Which bases there are is told by `gauge.py`. Powers of two are used only where every value of the call and of its twin stays
normal, which is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shaketable.locate.capture.recorder import Recording, same
from shaketable.locate.probes.gauge import Gauge, free_spaces, gauge_of, paired, swapped
from shaketable.locate.probes.wiring import Circuit, Map
from shaketable.sites.nested_tensors import map_tensors, tensors_of

LARGEST_EXPONENT = 3
ENOUGH = 32
"""Where a tolerance is needed anyway, about this many tokens of a sequence are compared: enough to see a lane."""


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


@dataclass
class Shuffle:
    """A permutation of every space: channel i of the twin is channel order[i] of the original."""

    spaces: dict[str, Tensor]


def draw_shuffle(circuit: Circuit, seed: int) -> Shuffle:
    """Random orders of the stream, the MLP's channels, key/value heads with their query heads, and the values' channels.

    Each is one cycle through all channels, so that no channel stays where it was.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = {name: torch.arange(size) for name, size in circuit.sizes.items()}
    stream = _cycle(circuit.sizes["stream"], generator)
    for space in ("stream", "n1", "n2", "attended", "fed"):
        orders[space] = stream
    for prefix in ("", "shared "):
        if f"{prefix}hidden" in circuit.sizes:
            hidden = _cycle(circuit.sizes[f"{prefix}hidden"], generator)
            orders.update({f"{prefix}{space}": hidden for space in ("gate", "up", "hidden")})
    head, groups = circuit.head, circuit.groups
    pairs = _cycle(circuit.sizes["k"] // head, generator)
    orders["k"] = torch.arange(circuit.sizes["k"]).view(-1, head)[pairs].flatten()
    orders["q"] = torch.arange(circuit.sizes["q"]).view(-1, groups * head)[pairs].flatten()
    inner = torch.stack([_cycle(head, generator) for _ in range(len(pairs))])
    values = inner + head * torch.arange(len(pairs))[:, None]
    queried = inner[:, None] + head * torch.arange(groups * len(pairs)).view(-1, groups, 1)
    orders["v"], orders["mixed"] = values[pairs].flatten(), queried[pairs].flatten()
    return Shuffle(orders)


def _cycle(n: int, generator: torch.Generator) -> Tensor:
    """A random order that is a single cycle."""
    path = torch.randperm(n, generator=generator)
    order = torch.empty_like(path)
    order[path] = path.roll(-1)
    return order


@contextmanager
def shuffled(layer: nn.Module, circuit: Circuit, shuffle: Shuffle) -> Iterator[None]:
    """The layer with permuted weights, for as long as the context is open."""
    changed = {}
    for m in circuit.maps:
        rows, columns = _order(m.writes, circuit, shuffle), shuffle.spaces[m.reads]
        changed[m.parameter] = _reordered(layer.get_parameter(m.parameter), rows, columns, m)
        if m.bias is not None:
            changed[m.bias] = layer.get_parameter(m.bias).detach()[rows.to(layer.get_parameter(m.bias).device)]
    for norm in circuit.norms:
        order = shuffle.spaces[norm.writes]
        for name, parameter in layer.get_submodule(norm.module)._parameters.items():
            if parameter is not None:
                changed[f"{norm.module}.{name}"] = parameter.detach()[order.to(parameter.device)]
    with swapped(layer, changed, {}):
        yield


def _order(spaces: tuple[str, ...], circuit: Circuit, shuffle: Shuffle) -> Tensor:
    """The order of spaces side by side: each is shifted behind the ones before it."""
    parts, start = [], 0
    for space in spaces:
        parts.append(shuffle.spaces[space] + start)
        start += circuit.sizes[space]
    return torch.cat(parts)


def _reordered(weight: Tensor, rows: Tensor, columns: Tensor, m: Map) -> Tensor:
    rows, columns = rows.to(weight.device), columns.to(weight.device)
    if m.layout == "in,out":
        rows, columns = columns, rows
    return weight.detach().index_select(-2, rows).index_select(-1, columns)


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
    found = _compare(next(tensors_of(original.output)), next(tensors_of(twin.output)), ("stream",), gauge)
    return None if found is None else TwinDifference(None, *found, last)


def until(recording: Recording, token: int) -> Recording:
    """What the leaves took and gave, of the tokens before one."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :token] if tensor.dim() == 3 else tensor

    leaves = [r for r in recording.records if r.func is None]
    records = [replace(r, args=map_tensors(r.args, cut), kwargs={}, output=map_tensors(r.output, cut)) for r in leaves]
    return Recording(records, [], map_tensors(recording.output, cut))


def moved_pairs(
    circuit: Circuit, shuffle: Shuffle, original: Recording, twin: Recording
) -> Iterator[tuple[str | None, Tensor, Tensor]]:
    """Every leaf's result with the twin's in the original order, and the layer's own.

    The twin's first sequence counts; of a long one, some tokens are enough to see a lane.
    """
    writes = circuit.outputs()
    partners = {r.path: r for r in twin.records if r.func is None}
    for record in original.records:
        if record.func is None and record.path in writes and record.path in partners:
            a, b = next(tensors_of(record.output)), next(tensors_of(partners[record.path].output))
            yield record.path, *_restored(a, b, circuit, shuffle, writes[record.path])
            if circuit.inputs()[record.path] in ("mixed", "hidden"):
                other = partners[record.path]
                a, b = _tensor(record.args, record.kwargs), _tensor(other.args, other.kwargs)
                yield _between(record.path), *_restored(a, b, circuit, shuffle, (circuit.inputs()[record.path],))
    a, b = next(tensors_of(original.output)), next(tensors_of(twin.output))
    yield None, *_restored(a, b, circuit, shuffle, ("stream",))


def _restored(a: Tensor, b: Tensor, circuit: Circuit, shuffle: Shuffle, spaces: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    back = _order(spaces, circuit, shuffle).argsort().to(b.device)
    b = b[: a.shape[0]]
    if a.dim() == 3:
        step = compared_step(a.shape[1])
        a, b = a[:, ::step], b[:, ::step]
    return a, b.index_select(-1, back)


def compared_step(tokens: int) -> int:
    """Every how many tokens one is compared where a tolerance is needed."""
    return max(1, tokens // ENOUGH)


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

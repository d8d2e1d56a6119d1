"""Rounding-interval replay: every recorded operator computed again on the host, from the inputs it really had.

Because each operator is judged from its own recorded inputs, a violation belongs to that operator and to no other. The
verdict of the host modes rests on this probe; it trusts the host's arithmetic, the file's weights and the model's code.

Checksums of matrix products (algorithm-based fault tolerance): a cheap look at every row.

The sum of a product's outputs is the product with the summed weights: with y = x wᵀ and any vector r, y·r = x·(wᵀr),
and with any vector s over tokens, sᵀy = (sᵀx)·wᵀ. r and s are random, between 1 and 1.5 in size, of either sign: two
channels or tokens that changed places change the sum, and so does any other error, but for a coincidence.

A result may differ by its rounding: a standard deviation of u|y|/√3 for the value itself and 3ua‖x‖‖w‖ for the order of
summation; of a sum, the root of the summed squares; six of them are the threshold. An error drowns in the rounding of
its neighbours, so a row is summed sixteen channels at a time: in float32 the threshold is then about the width of the
rounding interval of a single value. What fires is replayed: a checksum by itself blames nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shaketable.capture.recorder import Record, Recording, function_name
from shaketable.capture.reference import Reference
from shaketable.numerics import operators
from shaketable.numerics.intervals import ACCUMULATION, UNIT, Allowed, Precision, RoundingInterval, host_arithmetic
from shaketable.numerics.operators import WIDENED, Call, Leaf, Weight
from shaketable.sites.nested_tensors import map_tensors, tensors_of

THRESHOLD = 6.0
BLOCK = 16
"""How many channels of a row are summed at a time."""
CHUNK = 4096
"""How many channels are looked at in one go: a language model's head has a hundred thousand."""


def check_products(recording: Recording, reference: Reference, prefix: str, precision: Precision) -> dict[str, float]:
    """Row and column checksums of every linear leaf of a recording: the worst, in units of its threshold."""
    scores: dict[str, float] = {}
    for record in recording.records:
        full = f"{prefix}.{record.path}"
        leaf = reference.leaf(full) if record.func is None else None
        if leaf is not None and leaf.kind in ("linear", "conv1d"):
            x, y = next(tensors_of((record.args, record.kwargs))), next(tensors_of(record.output))
            with host_arithmetic():
                scores[record.path] = _score(x.detach().cpu(), y.detach().cpu(), leaf, full, reference, precision)
    return scores


def _score(x: Tensor, y: Tensor, leaf: Leaf, full: str, reference: Reference, precision: Precision) -> float:
    w = reference.wide(reference.weight(f"{full}.weight"))
    w = w if leaf.kind == "linear" else w.T
    bias = reference.weight(f"{full}.bias") if leaf.module._parameters.get("bias") is not None else None
    worst = torch.stack([row_scores(x, y, w, bias, precision).max(), _columns(x, y, w, bias, precision).max()]).max()
    return float(worst)


def row_scores(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> Tensor:
    """The row checksums of x @ wᵀ + bias: the worst of each token, in units of its threshold."""
    rows, results = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1])
    weights = _random(w.shape[0])
    parts = []
    for at in range(0, w.shape[0], CHUNK):
        some = slice(at, at + CHUNK)
        shift = None if bias is None else bias[some].double()
        parts.append(_row_part(rows, results[:, some], w[some].double(), shift, weights[some], precision).amax(1))
    return torch.stack(parts).amax(0).nan_to_num(nan=float("inf"))


def _row_part(rows: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, weights: Tensor, precision: Precision) -> Tensor:
    """(tokens, blocks). What is missing of the last block has weight zero."""
    blocks = -(-w.shape[0] // BLOCK)
    missing = blocks * BLOCK - w.shape[0]
    r = F.pad(weights, (0, missing)).view(blocks, 1, BLOCK)
    summed = (r @ F.pad(w, (0, 0, 0, missing)).view(blocks, BLOCK, -1)).squeeze(1)
    weighted = F.pad(y.double(), (0, missing)).view(-1, blocks, BLOCK) * r[:, 0]
    variance = weighted.square().sum(-1).mul_(UNIT[y.dtype] ** 2 / 3)
    sizes = F.pad(w.square().sum(1), (0, missing)).view(blocks, BLOCK)
    variance += (_inexact(precision) * rows.norm(dim=1, keepdim=True)).square() * (sizes * r[:, 0].square()).sum(-1)
    off = weighted.sum(-1) - rows @ summed.T
    off = off if bias is None else off - (F.pad(bias, (0, missing)).view(blocks, BLOCK) * r[:, 0]).sum(-1)
    return off.abs_() / _limit(variance)


def _columns(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> Tensor:
    """The column checksums, one per channel."""
    rows, wide = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1]).double()
    s = _random(rows.shape[0])
    variance = s.square() @ wide.square() * (UNIT[y.dtype] ** 2 / 3)
    variance += (s * rows.norm(dim=1)).square().sum() * _inexact(precision) ** 2 * w.square().sum(1)
    wide = wide if bias is None else wide - bias.double()
    scores: Tensor = (s @ wide - (s @ rows) @ w.T).abs() / _limit(variance)
    return scores.nan_to_num(nan=float("inf"))


def _inexact(precision: Precision) -> float:
    return 3 * ACCUMULATION + 2 * precision.product_input


def _limit(variance: Tensor) -> Tensor:
    return THRESHOLD * variance.sqrt() + 1e-30


def _random(n: int) -> Tensor:
    """Numbers from 1 to 1.5 with a random sign, the same ones for the same n."""
    generator = torch.Generator().manual_seed(n)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    return signs * (1 + torch.rand(n, generator=generator, dtype=torch.float64) / 2)


# ---- replay


ROWS = 128
"""How many tokens of a float32 product are replayed, at least; a quarter of them where there are more channels than HEAD."""
HEAD = 8192
PRODUCTS = ("linear", "conv1d")
LOWERED = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "addbmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
    ]
)
"""Functions whose arguments autocast gives a lower dtype; others take them as they are."""
_CANNOT = (NotImplementedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, StopIteration)
"""What a definition raises when it does not fit the call: then nobody can judge it."""


@dataclass
class Violation:
    """An operator whose result a correct device could not have returned."""

    path: str
    function: str | None
    order: int
    """Position in the call."""
    outside: Tensor
    """Which values, on the host."""
    got: Tensor
    low: Tensor
    """The allowed range, at the values that are outside."""
    high: Tensor
    tokens: list[int] | None = None
    """Which tokens these are, when not all were replayed."""

    @property
    def share(self) -> float:
        """The share of values outside of their interval."""
        return float(self.outside.double().mean()) if self.outside.numel() else 0.0

    @property
    def lanes(self) -> list[int]:
        """Channels (last dimension) with a violation."""
        flat = self.outside.reshape(-1, self.outside.shape[-1]) if self.outside.dim() else self.outside.reshape(1, 1)
        found: list[int] = flat.any(0).nonzero().flatten().tolist()
        return found


@dataclass
class Judgement:
    """What replay says of one recording."""

    violations: list[Violation] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators nobody can judge, with the reason."""
    judged: int = 0
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each operator: how many rows it made, how many were replayed, and how many passed by checksums alone. `agreed` are
    rows of a function without a definition, of which host and device have made the same bits."""

    def cover(self, label: str, rows: int, replayed: int, defined: bool) -> None:
        """Count what was looked at of one result."""
        counts = self.coverage.setdefault(label, {"rows": 0, "replayed": 0, "checksums": 0})
        counts["rows"] += rows
        if not defined:
            counts["agreed"] = counts.get("agreed", 0) + rows
            return
        counts["replayed"] += replayed
        counts["checksums"] += rows - replayed


@dataclass(frozen=True)
class Expected:
    """A result with what it may be."""

    got: Tensor
    allowed: Allowed | operators.Selection
    tokens: list[int] | None = None
    rows: int | None = None
    """How many rows there are, when these are not all."""
    defined: bool = True
    """Whether a result that is not allowed is wrong; without a definition nobody can say."""


class Host:
    """Tensors brought to the host and to float64, each once per recording."""

    def __init__(self, reference: Reference) -> None:
        self._near: dict[int, tuple[Tensor, Tensor]] = {}
        self.wide = reference.wide

    def near(self, tensor: Tensor) -> Tensor:
        """The tensor on the host."""
        if tensor.device.type == "cpu":
            return tensor.detach()
        if id(tensor) not in self._near:
            self._near[id(tensor)] = (tensor, tensor.detach().cpu())
        return self._near[id(tensor)][1]


def judge(
    recording: Recording, reference: Reference, prefix: str, precision: Precision, skip: set[str] | None = None
) -> Judgement:
    """Replay every operator of a recording.

    Args:
        prefix: Path of the recorded module in the model.
        skip: Leaves that are judged elsewhere.
    """
    judgement, host = Judgement(), Host(reference)
    with host_arithmetic():
        for order, record in enumerate(recording.records):
            if record.func is None and skip and record.path in skip:
                continue
            _judge_record(judgement, host, record, order, reference, prefix, precision)
    return judgement


def _judge_record(
    judgement: Judgement, host: Host, record: Record, order: int, reference: Reference, prefix: str, precision: Precision
) -> None:
    label = ":".join(part for part in (record.path, record.function) if part)
    is_view = record.func is not None and _is_view(record)
    defined = record.func is None or is_view or _is_defined(record)
    try:
        if is_view:
            made, defined = _viewed(host, record), record.function != "as_strided"  # its strides are those of the device
        else:
            made = _expected(host, record, reference, prefix, precision)
        expected = [(item, item.allowed.outside(item.got)) for item in made]
    except _CANNOT as error:
        judgement.unknown.setdefault(
            label, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )
        return
    judgement.judged += not is_view
    for item, outside in expected:
        got, wrong = item.got, bool(outside.any())
        if wrong and not (defined and item.defined):
            judgement.unknown.setdefault(label, f"no host definition of {record.function}, and host and device differ")
            continue
        if not is_view:  # nothing was computed, so there are no rows to count
            judgement.cover(label, rows_of(got) if item.rows is None else item.rows, rows_of(got), item.defined and defined)
        if wrong:
            judgement.violations.append(
                Violation(record.path, record.function, order, outside, got, *item.allowed.ends(outside), item.tokens)
            )


def rows_of(tensor: Tensor) -> int:
    """How many rows of channels a tensor has."""
    return tensor.shape[:-1].numel() if tensor.numel() else 0


def _is_view(record: Record) -> bool:
    """Whether the result is the input's own memory: nothing was computed."""
    name = record.function or ""
    if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__", "__itruediv__"):
        return False
    inputs = {t.untyped_storage().data_ptr() for t in tensors_of((record.args, record.kwargs)) if t.numel()}
    return bool(inputs) and all(t.untyped_storage().data_ptr() in inputs for t in tensors_of(record.output))


def _viewed(host: Host, record: Record) -> list[Expected]:
    """Views show the values of their input, each in its place."""
    args, kwargs = map_tensors(record.args, host.near), _on_host(map_tensors(record.kwargs, host.near))
    results = (record.output, record.func(*args, **kwargs))
    got, expected = ([operators.parts(t) if t.is_complex() else t for t in tensors_of(value)] for value in results)
    got = [host.near(t) for t in got]
    return [
        Expected(one, RoundingInterval.exactly(other))
        for one, other in zip(got, expected, strict=True)
        if (one.data_ptr(), one.shape, one.stride()) != (other.data_ptr(), other.shape, other.stride())
    ]


def _is_defined(record: Record) -> bool:
    name = record.function or ""
    if any(t.is_complex() for t in tensors_of((record.args, record.kwargs, record.output))):
        return operators.is_defined_for_complex(name)
    floating = any(t.is_floating_point() for t in tensors_of(record.output))
    return operators.is_defined(name) or not floating


def _expected(host: Host, record: Record, reference: Reference, prefix: str, precision: Precision) -> list[Expected]:
    results = [host.near(t) for t in tensors_of(record.output)]
    args, kwargs = _arguments(host, record, reference)
    call = Call(record.func, args, kwargs, results[0].dtype, precision, host.wide)
    if record.func is None:
        full = f"{prefix}.{record.path}" if prefix else record.path
        return [_leaf(call, results[0], full, reference, record)]
    name = function_name(record.func)
    if name in operators.BOUNDED and results[0].is_floating_point():
        try:
            return [Expected(results[0], operators.BOUNDED[name](call))]
        except operators.TooCoarseError:
            return [Expected(results[0], operators.rounded_once(call, name), defined=False)]
    if name in ("empty", "empty_like", "new_empty", "empty_strided"):  # no values yet
        return []
    if name in operators.SELECTING and (allowed := operators.selected(call, name, results)):
        return [Expected(got, one) for got, one in zip(results, allowed, strict=True)]
    if len(results) == 1 and results[0].is_complex():
        return [_complex(call, results[0], name)]
    if len(results) == 1:
        return [Expected(results[0], operators.rounded_once(call, name))]
    pairs = zip(results, tensors_of(record.func(*args, **kwargs)), strict=True)
    return [Expected(got, RoundingInterval.exactly(value)) for got, value in pairs]


def _complex(call: Call, got: Tensor, name: str) -> Expected:
    """A complex result, judged by its real and imaginary parts."""
    parts = operators.parts
    if name in operators.COMPLEX_BOUNDED:
        return Expected(parts(got), operators.COMPLEX_BOUNDED[name](call))
    return Expected(parts(got), RoundingInterval.exactly(parts(operators.rounded_once(call, name).low)))


def _leaf(call: Call, got: Tensor, full: str, reference: Reference, record: Record) -> Expected:
    """A leaf by its definition. Of a long float32 product some tokens are replayed, and those whose checksum fires."""
    leaf = reference.leaf(full)
    assert leaf is not None
    lowered = record.lowered if leaf.kind in PRODUCTS else None

    def weight(name: str) -> Tensor:
        held = record.weights.get(name)
        return _lowered(reference.weight(f"{full}.{name}") if held is None else held.detach().cpu(), lowered)

    rows = rows_of(got)
    kept = _tokens(call, got, leaf, weight) if leaf.kind in PRODUCTS and got.dim() == 3 else None
    if kept is not None:
        x = next(tensors_of((call.args, call.kwargs)))
        call, got = replace(call, args=(x[:, kept],), kwargs={}), got[:, kept]
    return Expected(got, leaf.allowed(call, weight), kept, rows)


def _tokens(call: Call, got: Tensor, leaf: Leaf, weight: Weight) -> list[int] | None:
    """Which tokens of a product to replay; None for all. The others pass by their checksums."""
    tokens = got.shape[1]
    step = tokens // (ROWS if got.shape[-1] <= HEAD else ROWS // 4)
    if step <= 1 or got.shape[0] > 1 or got.dtype != torch.float32:
        return None
    kept = {*range(0, tokens, step), tokens - 1}
    rest = sorted(set(range(tokens)) - kept)
    x, w = next(tensors_of((call.args, call.kwargs))), weight("weight")
    w = call.wide(w) if w.numel() <= WIDENED else w
    bias = weight("bias") if leaf.module._parameters.get("bias") is not None else None
    scores = row_scores(x[:, rest], got[:, rest], w if leaf.kind == "linear" else w.T, bias, call.precision)
    return sorted({*kept, *(rest[i] for i in (scores > 1).nonzero().flatten().tolist())})


def _lowered(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What autocast makes of an argument; it leaves numbers and whole numbers alone."""
    return tensor if dtype is None or not tensor.dim() or not tensor.is_floating_point() else tensor.to(dtype)


def _arguments(host: Host, record: Record, reference: Reference) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments on the host; the model's parameters come from the file."""

    lowered = record.lowered if record.func is None or record.function in LOWERED else None

    def bring(tensor: Tensor) -> Tensor:
        known = reference.like(tensor) if tensor.numel() else None
        return _lowered(host.near(tensor) if known is None else known, lowered)

    copies = record.func is not None and record.function is not None and record.function.endswith("_")
    args, kwargs = map_tensors(record.args, bring), map_tensors(record.kwargs, bring)
    if record.func is not None and not args and "input" in kwargs:  # by name: definitions take it as the first argument
        args = (kwargs.pop("input"),)
    if copies and args and isinstance(args[0], Tensor):
        args = (args[0].clone(), *args[1:])
    return args, _on_host(kwargs)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the host as the device where there is one."""
    return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs

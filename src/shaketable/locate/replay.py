"""Rounding-interval replay: every recorded operator computed again on the host, from the inputs it really had.

Because each operator is judged from its own recorded inputs, a violation belongs to that operator and to no other. The
verdict of the host modes rests on this probe; it trusts the host's arithmetic, the file's weights and the model's code.

Matrix products are screened by checksums (algorithm-based fault tolerance). With y = x wᵀ and any vector r, y·r = x·(wᵀr), and
with any vector s over tokens, sᵀy = (sᵀx)·wᵀ. r and s are random, between 1 and 1.5 in size, of either sign: two channels or
tokens that changed places change the sum, and so does any other error, but for a coincidence. A result may differ by its
rounding: a standard deviation of u|y|/√3 for the value itself and 3ua‖x‖‖w‖ for the order of summation; of a sum, the root of
the summed squares; six of them are the threshold. An error drowns in the rounding of its neighbours, so a row is summed sixteen
channels at a time: in float32 the threshold is then about the width of the rounding interval of a single value. A checksum
blames nothing: what fires is replayed. Of a long float32 product only `ROWS` tokens are replayed besides, and with `quick` only
products with a checksum that fires.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shaketable.capture.recorder import Record, Recording, function_name, is_wrapped
from shaketable.capture.reference import Reference
from shaketable.numerics.intervals import ACCUMULATION, UNIT, Allowed, Precision, RoundingInterval, host_arithmetic
from shaketable.numerics.operators import PRODUCTS, Call, Selection, allowed_results, parts, widened
from shaketable.sites.nested_tensors import map_tensors, tensors_of

ROWS = 128
"""Least number of tokens of a float32 product that are replayed; a quarter of them with more channels than HEAD."""
HEAD = 8192
THRESHOLD = 6.0
BLOCK = 16
"""Channels of a row that one checksum sums."""
CHUNK = 4096
"""Channels that are computed at a time: a language model's head has a hundred thousand."""
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
"""Errors of a definition that does not fit the call: then the operator cannot be judged."""


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


@dataclass
class Judgement:
    """The result of a replay."""

    violations: list[Violation] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators that cannot be judged, with the reason."""
    checksums: dict[str, float] = field(default_factory=dict)
    """With `quick`: the worst checksum of each product, in units of its threshold."""
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each operator: rows made, rows replayed, and rows that passed by checksums alone. `agreed` are
    rows of a function without a definition, of which host and device have made the same bits."""

    def cover(self, label: str, item: _Expected) -> None:
        """Count what was looked at of one result."""
        replayed = rows_of(item.got)
        rows = replayed if item.rows is None else item.rows
        counts = self.coverage.setdefault(label, {"rows": 0, "replayed": 0, "checksums": 0})
        counts["rows"] += rows
        if item.is_defined:
            counts["replayed"] += replayed
            counts["checksums"] += rows - replayed
        else:
            counts["agreed"] = counts.get("agreed", 0) + rows


@dataclass(frozen=True)
class _Expected:
    """A result with what it may be."""

    got: Tensor
    allowed: Allowed | Selection
    is_defined: bool = True
    """Whether a result that is not allowed is wrong; without a definition that is not known."""
    tokens: list[int] | None = None
    rows: int | None = None
    """Number of rows in all, when these are not all."""


def rows_of(tensor: Tensor) -> int:
    """Number of rows of channels in a tensor."""
    return tensor.shape[:-1].numel() if tensor.numel() else 0


def judge(
    recording: Recording,
    reference: Reference,
    prefix: str,
    precision: Precision,
    skip: set[str] | None = None,
    quick: bool = False,
) -> Judgement:
    """Replay every operator of a recording.

    Args:
        prefix: Path of the recorded module in the model.
        skip: Leaves that are judged elsewhere.
        quick: Replay only those products of leaves whose checksum fires.
    """
    judgement = Judgement()
    replay = _Replay(reference, prefix, precision, judgement.checksums if quick else None)
    with host_arithmetic():
        for order, record in enumerate(recording.records):
            if record.func is None and skip and record.path in skip:
                continue
            label = ":".join(part for part in (record.path, record.function) if part)
            is_view = _is_view(record)
            try:
                made = replay.viewed(record) if is_view else replay.expected(record)
                outside = [item.allowed.outside(item.got) for item in made]
            except _CANNOT as error:
                line = next(iter(str(error).splitlines()), "no message")
                judgement.unknown.setdefault(label, f"{type(error).__name__}: {line}")
                continue
            for item, wrong in zip(made, outside, strict=True):
                is_wrong = bool(wrong.any())
                if is_wrong and not item.is_defined:
                    text = f"no host definition of {record.function}, and host and device differ"
                    judgement.unknown.setdefault(label, text)
                    continue
                if not is_view:  # a view computes nothing, so there are no rows to count
                    judgement.cover(label, item)
                if is_wrong:
                    ends = item.allowed.ends(wrong)
                    found = Violation(record.path, record.function, order, wrong, item.got, *ends, item.tokens)
                    judgement.violations.append(found)
    return judgement


def _is_view(record: Record) -> bool:
    """Whether the result is the input's own memory: nothing was computed."""
    name = record.function or ""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__",
        "__iadd__",
        "__imul__",
        "__itruediv__",
    )
    given, made = list(tensors_of((record.args, record.kwargs))), list(tensors_of(record.output))
    if record.func is None or in_place or any(is_wrapped(t) for t in (*given, *made)):
        return False
    inputs = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    return bool(inputs) and all(t.untyped_storage().data_ptr() in inputs for t in made)


class _Replay:
    """The host's side of one recording.

    Args:
        checksums: Where the checksums of products are noted; None when every product is replayed.
    """

    def __init__(self, reference: Reference, prefix: str, precision: Precision, checksums: dict[str, float] | None) -> None:
        self.reference, self.prefix, self.precision, self.checksums = reference, prefix, precision, checksums

    def viewed(self, record: Record) -> list[_Expected]:
        """Views show the values of their input, each in its place."""
        near = self.reference.near
        args, kwargs = map_tensors(record.args, near), _on_host(map_tensors(record.kwargs, near))
        results = (record.output, record.func(*args, **kwargs))
        got, expected = ([parts(t) if t.is_complex() else t for t in tensors_of(value)] for value in results)
        is_defined = record.function != "as_strided"  # its strides are those of the device
        return [
            _Expected(one, RoundingInterval.exactly(other), is_defined)
            for one, other in zip(map(near, got), expected, strict=True)
            if (one.data_ptr(), one.shape, one.stride()) != (other.data_ptr(), other.shape, other.stride())
        ]

    def expected(self, record: Record) -> list[_Expected]:
        """Allowed results of an operator."""
        results = [self.reference.near(t) for t in tensors_of(record.output)]
        args, kwargs = self._arguments(record)
        call = Call(record.func, args, kwargs, results[0].dtype, self.precision, self.reference.wide)
        if record.func is None:
            return [self._leaf(call, results[0], record)]
        pairs, is_defined = allowed_results(call, function_name(record.func), results)
        return [_Expected(got, allowed, is_defined) for got, allowed in pairs]

    def _arguments(self, record: Record) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments on the host; the model's parameters come from the file."""
        name = record.function or ""
        lowered = record.lowered if record.func is None or name in LOWERED else None

        def bring(tensor: Tensor) -> Tensor:
            known = self.reference.like(tensor) if tensor.numel() else None
            return as_autocast(self.reference.near(tensor) if known is None else known, lowered)

        args, kwargs = map_tensors(record.args, bring), map_tensors(record.kwargs, bring)
        if record.func is not None and not args and "input" in kwargs:  # by name: definitions take it as the first argument
            args = (kwargs.pop("input"),)
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            args = (args[0].clone(), *args[1:])
        return args, _on_host(kwargs)

    def _leaf(self, call: Call, got: Tensor, record: Record) -> _Expected:
        """A module by its definition; of a product, the tokens that are replayed."""
        full = ".".join(part for part in (self.prefix, record.path) if part)
        leaf = self.reference.leaf(full)
        assert leaf is not None
        lowered = record.lowered if leaf.kind in PRODUCTS else None

        def weight(name: str) -> Tensor:
            held = record.weights.get(name)
            return as_autocast(self.reference.weight(f"{full}.{name}") if held is None else held.detach().cpu(), lowered)

        rows, tokens = rows_of(got), None
        if leaf.kind in PRODUCTS and got.numel():
            x, w = next(tensors_of((call.args, call.kwargs))), widened(call, weight("weight"))
            factors = w if leaf.kind == "linear" else w.T, weight("bias") if leaf.has_bias else None
            if self.checksums is not None:
                worst = max(
                    float(row_scores(x, got, *factors, call.precision).max()), _columns(x, got, *factors, call.precision)
                )
                self.checksums[record.path] = max(worst, self.checksums.get(record.path, 0.0))
                if worst <= 1:
                    return _Expected(got[:0], RoundingInterval.exactly(got[:0]), rows=rows)
            tokens = _tokens(x, got, *factors, call.precision)
            if tokens is not None:
                call, got = replace(call, args=(x[:, tokens],), kwargs={}), got[:, tokens]
        return _Expected(got, leaf.allowed(call, weight), tokens=tokens, rows=rows)


def as_autocast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An argument as an autocast to `dtype` casts it; it leaves numbers and integer tensors alone."""
    return tensor if dtype is None or not tensor.dim() or not tensor.is_floating_point() else tensor.to(dtype)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the host as the device where there is one."""
    return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs


# ---- checksums


def _tokens(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> list[int] | None:
    """Which tokens of a product to replay; None for all. The others pass by their checksums."""
    if y.dim() != 3 or y.shape[0] > 1 or y.dtype != torch.float32:
        return None
    tokens = y.shape[1]
    step = tokens // (ROWS if y.shape[-1] <= HEAD else ROWS // 4)
    if step <= 1:
        return None
    kept = {*range(0, tokens, step), tokens - 1}
    rest = sorted(set(range(tokens)) - kept)
    scores = row_scores(x[:, rest], y[:, rest], w, bias, precision)
    return sorted({*kept, *(rest[i] for i in (scores > 1).nonzero().flatten().tolist())})


def row_scores(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> Tensor:
    """The row checksums of x @ wᵀ + bias: the worst of each token, in units of its threshold."""
    rows, results = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1])
    weights = _random(w.shape[0])
    worst = []
    for at in range(0, w.shape[0], CHUNK):
        some = slice(at, at + CHUNK)
        shift = None if bias is None else bias[some].double()
        worst.append(_row_part(rows, results[:, some], w[some].double(), shift, weights[some], precision).amax(1))
    return torch.stack(worst).amax(0).nan_to_num(nan=float("inf"))


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


def _columns(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> float:
    """The worst column checksum."""
    rows, wide, w = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1]).double(), w.double()
    s = _random(rows.shape[0])
    variance = s.square() @ wide.square() * (UNIT[y.dtype] ** 2 / 3)
    variance += (s * rows.norm(dim=1)).square().sum() * _inexact(precision) ** 2 * w.square().sum(1)
    wide = wide if bias is None else wide - bias.double()
    scores: Tensor = (s @ wide - (s @ rows) @ w.T).abs() / _limit(variance)
    return float(scores.nan_to_num(nan=float("inf")).max())


def _inexact(precision: Precision) -> float:
    return 3 * ACCUMULATION + 2 * precision.product_input


def _limit(variance: Tensor) -> Tensor:
    return THRESHOLD * variance.sqrt() + 1e-30


def _random(n: int) -> Tensor:
    """Numbers from 1 to 1.5 with a random sign, the same ones for the same n."""
    generator = torch.Generator().manual_seed(n)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    return signs * (1 + torch.rand(n, generator=generator, dtype=torch.float64) / 2)

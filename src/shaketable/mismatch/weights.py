"""Stage 5: every parameter of the engine against the trainer's, bit for bit, and how those that differ are related.

A cast of all weights to the dtype that the engine computes in is what was asked for, and no defect. Everything else is. The
classes are tried in order of how exactly they can be shown: the values that the trainer's were rounded from, the bits of
another parameter, the transpose, the same rows in another order, the bits of an earlier checkpoint, values of a coarser dtype,
integers or float8 times a scale, one factor, few distinct values in a row. The rest, if still close, is `stale`: mostly of
another step, and said with that doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shaketable.mismatch.results import ParameterDifference, Weights

COARSER = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
CLOSE = 0.5
"""Weights of another step: the difference is smaller than this, relative to the weights."""
LEVELS = 256
"""A row with at most so many values is quantized to eight bits or fewer."""
LONGEST_ROW = 8
FORMATS = (("int8", 127), ("int8", 128), ("int4", 7), ("int4", 8), ("float8_e4m3fn", 448))
"""Formats of quantized weights, and the number that the largest value becomes."""
GROUPS = (32, 64, 128)
ROWS = 64
ALL = 0.99
"""Share of equal values from which a format is recognised: scales were rounded too."""
STEP = 1e-4
"""A weight multiplied by a factor this close to 1 is one of another training step: one update moves it by as much."""
ROUNDED = 0.9
"""Share of equal values from which one is called the other's rounding: float16 was rounded itself, and ties go either way."""
Parameters = Mapping[str, Tensor]


def compare(
    trainer: Parameters,
    engine: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    earlier: Mapping[str, Parameters] | None = None,
    other_source: dict[str, Tensor] | None = None,
) -> Weights:
    """Compare all parameters.

    Args:
        trainer: By name, on any device.
        engine: Name and values, one after another.
        dtype: In which the engine computes.
        earlier: Parameters of earlier checkpoints by their name: which of them a stale weight is of.
        other_source: Receives the engine's weights that were not rounded from the trainer's, but from their source.
    """
    found: list[ParameterDifference] = []
    seen: set[str] = set()
    unknown: list[str] = []
    cast = 0
    for name, got in engine:
        if name not in trainer:
            unknown += [name] if bool(got.any()) else []
            continue
        seen.add(name)
        pair = _Pair(name, trainer[name].detach().cpu(), got, dtype, trainer, earlier or {})
        cast += pair.own.dtype != got.dtype
        if pair.is_equal:
            if other_source is not None and not pair.is_cast and _is_of_one_source(pair.own, got):
                other_source[name] = got
            continue
        found.append(pair.difference())
    pointers = {trainer[name].data_ptr() for name in seen}
    missing = sorted(name for name, own in trainer.items() if name not in seen and own.data_ptr() not in pointers)
    absent = list(_absent(trainer, missing, found))
    named = {d.name for d in absent}
    extra = [ParameterDifference(n, "extra", "is a bias that the trainer has not") for n in unknown if _is_bias(n, trainer)]
    return Weights(
        compared=len(seen),
        cast=cast if dtype != next(iter(trainer.values())).dtype else 0,
        differing=absent + found + extra,
        engine_dtype=str(dtype).removeprefix("torch."),
        missing=[name for name in missing if name not in named and not _is_under(name, named)],
        unknown=unknown,
    )


def _absent(trainer: Parameters, missing: list[str], found: list[ParameterDifference]) -> Iterator[ParameterDifference]:
    """Layers and biases that the engine does not have, though it gives their neighbours."""
    gone: set[str] = set()
    for above in sorted({place[1] for name in missing if (place := re.match(r"(.*\blayers?)\.\d+\.", name)) is not None}):
        numbers = {int(n[len(above) + 1 :].split(".")[0]) for n in trainer if n.startswith(f"{above}.")}
        absent = {i for i in numbers if all(n in missing for n in trainer if n.startswith(f"{above}.{i}."))}
        if not absent:
            continue
        shifted = {int(d.name[len(above) + 1 :].split(".")[0]) for d in found if d.name.startswith(f"{above}.")}
        says = f"is missing: the engine has {len(numbers) - len(absent)} layers, the trainer {len(numbers)}"
        for i in sorted({min(shifted | absent)} | absent):
            gone.add(f"{above}.{i}")
            yield ParameterDifference(f"{above}.{i}", "layer_missing", says)
    for name in missing:
        is_alone = _is_bias(name, trainer) and f"{name[:-5]}.weight" not in missing and not _is_under(name, gone)
        if is_alone and bool(trainer[name].any()):
            count = trainer[name].numel()
            yield ParameterDifference(name, "missing", "is missing: the engine computes without it", count, count)


def _is_bias(name: str, trainer: Parameters) -> bool:
    return name.endswith(".bias") and f"{name[:-5]}.weight" in trainer


def _is_under(name: str, parts: set[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


@dataclass(frozen=True)
class _Pair:
    """One parameter on both sides."""

    name: str
    own: Tensor
    got: Tensor
    dtype: torch.dtype
    trainer: Parameters
    earlier: Mapping[str, Parameters] = field(default_factory=dict)

    @cached_property
    def expected(self) -> Tensor:
        """The trainer's in the dtype that the engine computes in."""
        return self.own.to(self.dtype)

    def holds(self, weight: Tensor) -> bool:
        """Whether the engine holds these values, cast to its dtype."""
        return weight.shape == self.got.shape and _is_equal(weight.detach().cpu().to(self.dtype).to(self.got.dtype), self.got)

    @cached_property
    def is_cast(self) -> bool:
        """Whether the engine holds the trainer's values, cast to its dtype."""
        return self.holds(self.own)

    @property
    def is_equal(self) -> bool:
        """Whether the engine's are the trainer's: as they are, cast, or rounded from the same source in another format."""
        own, got = self.own, self.got
        if own.shape != got.shape:
            return False
        return self.is_cast or (own.dtype == got.dtype and _is_equal(own, got)) or _is_of_one_source(own, got)

    def difference(self) -> ParameterDifference:
        """The first class that fits."""
        if self.own.shape != self.got.shape:
            if self.own.dim() == 2 and self.holds(self.own.T):
                return ParameterDifference(self.name, "transposed", "is transposed", self.got.numel(), self.own.numel())
            shapes = f"is {tuple(self.got.shape)}, not {tuple(self.own.shape)}"
            return ParameterDifference(self.name, "shape", shapes, self.got.numel(), self.own.numel())
        differing = int((self.expected.double() != self.got.double()).sum())
        return ParameterDifference(self.name, *(self._by_bits() or self._by_value()), differing, self.own.numel())

    def _by_bits(self) -> tuple[str, str] | None:
        """The classes that are shown exactly."""
        own, got = self.own, self.got
        if got.dtype != own.dtype and float((got.to(own.dtype) == own).double().mean()) > ROUNDED:
            finer, coarser = (str(t.dtype).removeprefix("torch.") for t in (got, own))
            return "finer", f"is what the trainer's was rounded from: {finer} against {coarser}"
        for other, parameter in self.trainer.items():
            if other != self.name and self.holds(parameter):
                return "other_parameter", f"holds the values of {other}"
        if own.dim() == 2 and self.holds(own.T):
            return "transposed", "is transposed"
        if (moved := _reordered(self.expected, got)) is not None:
            return "permuted", moved
        for checkpoint, parameters in self.earlier.items():
            if self.name in parameters and self.holds(parameters[self.name]):
                return "earlier", f"is that of {checkpoint}"
        return None

    def _by_value(self) -> tuple[str, str]:
        """The classes that are shown by the size of the differences."""
        x, y = self.expected.double(), self.got.double()
        wrong = x != y
        for lower in COARSER:
            if lower != self.dtype and any(
                torch.equal(t.to(lower).double()[wrong], y[wrong]) for t in (self.own, self.expected)
            ):
                return "cast", f"was cast to {str(lower).removeprefix('torch.')}"
        if not bool(y[wrong].any()):
            return "scaled", f"{_where(wrong)}is zero"
        for source in (self.own.double(), x):
            if (name := _format(source, y, wrong, torch.finfo(self.got.dtype).eps)) is not None:
                return "quantized", f"was quantized to {name}"
        ratio = y[wrong & (x != 0)] / x[wrong & (x != 0)]
        near = max(4 * torch.finfo(self.dtype).eps, STEP)
        factor = float(ratio.mean()) if ratio.numel() else 1.0
        if abs(factor - 1) > near and float(ratio.std(unbiased=False)) < near * abs(factor):
            return "scaled", f"{_where(wrong)}is multiplied by {factor:.6g}"
        relative = float((y - x).norm() / x.norm().clamp_min(1e-300))
        if _levels(y) <= LEVELS and 2 * _levels(y) < _levels(x):
            return "quantized", f"has {_levels(y)} distinct values in a row, relative error {relative:.2g}"
        rows = (wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong).nonzero().flatten().tolist()
        what = "experts" if wrong.dim() > 2 else "rows"
        which = f" ({', '.join(map(str, rows))})" if wrong.dim() > 2 and len(rows) < min(len(wrong), 9) else ""
        where = f"{len(rows):,} of {len(wrong):,} {what} differ{which}, relative difference {relative:.2g}"
        is_close = relative < CLOSE
        close = f"holds close values, of another step or in another format: {where}"
        return ("stale", close) if is_close else ("other_values", f"holds other values: {where}")


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign of a zero; NaNs equal one another."""
    return bool(torch.equal(a, b)) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _is_of_one_source(own: Tensor, got: Tensor) -> bool:
    """Whether both can be roundings of the same values, in two formats of which neither holds the other: float16, bfloat16."""
    if {own.dtype, got.dtype} != {torch.float16, torch.bfloat16}:
        return False
    a, b = own.double(), got.double()
    halves = sum(
        torch.exp2(t.double().abs().clamp_min(torch.finfo(t.dtype).smallest_normal).log2().floor())
        * torch.finfo(t.dtype).eps
        / 2
        for t in (own, got)
    )
    overflows = ~a.isfinite() & (b.abs() > torch.finfo(torch.float16).max)
    return bool((((a - b).abs() <= halves) | overflows | (a == b)).all())


def _where(wrong: Tensor) -> str:
    """The part of a weight that differs, as the beginning of a sentence: empty for all of it."""
    if wrong.dim() < 2:
        places = wrong.nonzero().flatten().tolist()
        if len(places) > len(wrong) // 2:
            return ""
        return f"value {places[0]} " if len(places) == 1 else f"{len(places)} values from {places[0]} on: each "
    lines = wrong.flatten(2).any(2) if wrong.dim() > 2 else wrong
    for axis, what in enumerate(("expert", "row") if wrong.dim() > 2 else ("row", "column")):
        places = lines.any(1 - axis).nonzero().flatten().tolist()
        if len(places) == 1:
            return f"has one {what} that is not the trainer's: {what} {places[0]} "
        if len(places) < lines.shape[axis] // 2:
            return f"has {len(places)} {what}s that are not the trainer's ({places[0]} to {places[-1]}): each "
    return ""


def _format(x: Tensor, y: Tensor, wrong: Tensor, eps: float) -> str | None:
    """The format, with a scale, that makes the engine's values of the trainer's; tried on the first rows that differ."""
    if x.dim() != 2:
        return None
    rows, size = wrong.any(1).nonzero().flatten()[:ROWS], x.shape[1]
    tops = {"the whole": x.abs().amax()}
    x, y = x[rows], y[rows]
    tops = {"each row": x.abs().amax(1, keepdim=True)} | tops
    for n in GROUPS:
        if size % n == 0 and n < size:
            tops[f"each {n} values"] = x.reshape(len(x), -1, n).abs().amax(2).repeat_interleave(n, 1)
    for what, top in tops.items():
        for name, largest in FORMATS:
            scale = (top / largest).clamp_min(1e-300)
            made = x / scale
            if name.startswith("int"):
                half = 2 ** (int(name[3:]) - 1)
                made = made.round().clamp(-half, half - 1) * scale
            else:
                made = made.to(getattr(torch, name)).double() * scale
            if float(((made - y).abs() <= 2 * eps * y.abs() + 1e-12).double().mean()) > ALL:
                return f"{name}, one scale for {what}"
    return None


def _reordered(expected: Tensor, got: Tensor) -> str | None:
    """Whether the engine has the same rows (or columns) in another order."""
    sides = [("experts" if expected.dim() > 2 else "rows", expected, got)] + (
        [("columns", expected.mT, got.mT)] if expected.dim() == 2 else []
    )
    for way, a, b in sides:
        wrong = (a.double() != b.double()).flatten(1).any(1) if a.dim() > 1 else a.double() != b.double()
        places = wrong.nonzero().flatten()
        if len(places) < 2:
            continue
        first, second = (t[places].double().reshape(len(places), -1).numpy() for t in (a, b))
        ordered = [rows[np.lexsort(rows[:, :LONGEST_ROW].T)] for rows in (first, second)]
        if np.array_equal(ordered[0], ordered[1]):
            return f"has {len(places)} {way} in another order, {int(places[0])} to {int(places[-1])}"
    return None


def _levels(x: Tensor) -> int:
    """The most distinct values among some rows."""
    rows = x.reshape(-1, x.shape[-1])[:: max(1, x.shape[0] // 8)]
    return max(int(row.unique().numel()) for row in rows)

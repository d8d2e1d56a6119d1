"""Every parameter of the engine against the trainer's, bit for bit, and what those that differ look like.

A cast of all weights to the dtype that the engine computes in is what was asked for, and no defect. Everything else is. The
classes are asked in order of how exactly they can be shown: what the trainer's was rounded from, the bits of another
parameter, the transpose, the same rows in another order, the bits of an earlier checkpoint, one factor, values of a coarser
dtype, few distinct values in a row. What is left and still close is `stale`: weights of another step.

Where the two sides are processes that share no memory, digests are compared first (`DigestComparison`), and only what differs
is sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ShaketableError

COARSER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
CLOSE = 0.5
"""Weights of another step: what differs is smaller than this, relative to the weights."""
LEVELS = 256
"""A row with at most so many values is quantized to eight bits or fewer."""
LONGEST_ROW = 8
ROUNDED = 0.9
"""Share of equal values from which one is called the other's rounding: float16 was rounded itself, and ties go either way."""


@dataclass(frozen=True)
class ParameterDifference:
    """A parameter that is not the trainer's."""

    name: str
    kind: str
    """layer_missing, missing, extra, finer, shape, other_parameter,
    transposed, permuted, earlier, scaled, cast, quantized, stale, other_values."""
    says: str
    differing: int
    values: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return dict(vars(self))


def compare(
    trainer: Mapping[str, Tensor],
    engine: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    earlier: Mapping[str, Mapping[str, Tensor]] | None = None,
    other_source: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Hold all parameters against each other.

    Args:
        trainer: By name, on any device.
        engine: Name and values, one after another.
        dtype: In which the engine computes.
        earlier: Parameters of earlier checkpoints by their name: which of them a stale weight is of.
        other_source: Takes the engine's weights that were not rounded from the trainer's, but from their source.
    """
    found: list[ParameterDifference] = []
    seen: set[str] = set()
    unknown: list[str] = []
    nonzero: set[str] = set()
    cast = 0
    for name, got in engine:
        if name not in trainer:
            unknown.append(name)
            nonzero |= {name} if bool(got.any()) else set()
            continue
        seen.add(name)
        own = trainer[name].detach().cpu()
        cast += own.dtype != got.dtype
        difference = _difference(name, own, got, dtype, trainer, earlier or {})
        if (
            difference is None
            and other_source is not None
            and _of_one_source(own, got)
            and not _equal(own.to(dtype).to(got.dtype), got)
        ):
            other_source[name] = got
        if difference is not None:
            found.append(difference)
    missing = sorted(set(trainer) - seen - _tied(trainer, seen))
    found = _absent(trainer, missing, found) + found
    told = {d.name for d in found if d.kind in ("missing", "layer_missing")}
    missing = [name for name in missing if name not in told and not _under(name, told)]
    extra = [name for name in unknown if name in nonzero]
    found += [
        ParameterDifference(name, "extra", "is a bias that the trainer has not", 0, 0)
        for name in extra
        if _is_bias(name, trainer)
    ]
    return {
        "compared": len(seen),
        "cast": cast if dtype != _dtype(trainer) else 0,
        "engine_dtype": str(dtype).removeprefix("torch."),
        "differing": [d.to_dict() for d in found],
        "not_told": missing,
        "unknown": [name for name in unknown if name in nonzero],
    }


def _absent(trainer: Mapping[str, Tensor], missing: list[str], found: list[ParameterDifference]) -> list[ParameterDifference]:
    """Layers and biases that the engine has not: it does not tell them, though it tells their neighbours."""
    rows: list[ParameterDifference] = []
    layers = {place[1] for name in missing if (place := re.match(r"(.*\blayers?)\.\d+\.", name)) is not None}
    for above in sorted(layers):
        counts = {int(n[len(above) + 1 :].split(".")[0]) for n in trainer if n.startswith(f"{above}.")}
        absent = {i for i in counts if all(n in missing for n in trainer if n.startswith(f"{above}.{i}."))}
        if not absent:
            continue
        shifted = [int(d.name[len(above) + 1 :].split(".")[0]) for d in found if d.name.startswith(f"{above}.")]
        first = min([*shifted, *absent])
        says = f"is missing: the engine has {len(counts) - len(absent)} layers, the trainer {len(counts)}"
        rows += [ParameterDifference(f"{above}.{i}", "layer_missing", says, 0, 0) for i in sorted({first} | absent)]
    gone = {d.name for d in rows}
    for name in missing:
        if (
            _is_bias(name, trainer)
            and f"{name[:-5]}.weight" not in missing
            and not _under(name, gone)
            and bool(trainer[name].any())
        ):
            rows.append(
                ParameterDifference(
                    name, "missing", "is missing: the engine computes without it", trainer[name].numel(), trainer[name].numel()
                )
            )
    return rows


def _is_bias(name: str, trainer: Mapping[str, Tensor]) -> bool:
    return name.endswith(".bias") and f"{name[:-5]}.weight" in trainer


def _under(name: str, parts: set[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def digest(weight: Tensor) -> str:
    """SHA-256 of a weight's bytes; zeros have no sign in it."""
    unsigned = weight.detach().cpu() + 0 if weight.element_size() > 1 else weight.detach().cpu()
    return hashlib.sha256(unsigned.contiguous().view(torch.uint8).numpy().data).hexdigest()


def unlike(own: Tensor, dtype: torch.dtype, told: tuple[str, str]) -> bool:
    """Whether an engine that computes in `dtype` does not hold this weight; `told` is the dtype it holds and its digest."""
    held: torch.dtype = getattr(torch, told[0])
    expected = [own.to(dtype).to(held), *([own] if own.dtype == held else [])]
    return all(digest(weight) != told[1] for weight in expected)


class DigestComparison:
    """A sampler's digests against a trainer's weights, which come one after another.

    Args:
        told: By name, the dtype in which the sampler holds a weight, and its digest.
        dtype: In which it computes.
    """

    def __init__(self, told: Mapping[str, tuple[str, str]], dtype: torch.dtype) -> None:
        self.told, self.dtype = told, dtype
        self.seen: set[str] = set()
        self.cast = 0
        self.differing: dict[str, Tensor] = {}
        """The trainer's weights that the sampler does not hold."""

    def look(self, name: str, own: Tensor) -> None:
        """Compare one weight, if the sampler has told of it."""
        if (held := self.told.get(name)) is None:
            return
        self.seen.add(name)
        self.cast += getattr(torch, held[0]) != own.dtype
        if unlike(own, self.dtype, held):
            self.differing[name] = own.cpu()

    def result(self, parameters: Callable[[list[str]], Iterable[tuple[str, Tensor]]]) -> dict[str, Any]:
        """As `compare` says it; `parameters` fetches weights of the sampler.

        Raises:
            ShaketableError: Nothing was compared, which must not look like weights that are all equal.
        """
        if not self.seen:
            raise ShaketableError("no weight of the sampler has the name of one of the trainer's: nothing was compared")
        names = list(self.differing)
        found = compare(self.differing, parameters(names), self.dtype)["differing"] if names else []
        unknown = sorted(set(self.told) - self.seen)
        return {"differing": found, "compared": len(self.seen), "cast": self.cast, "unknown": unknown}


def _dtype(trainer: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(trainer.values())).dtype


def _tied(trainer: Mapping[str, Tensor], seen: set[str]) -> set[str]:
    """Names of parameters that an engine has told under another name."""
    told = {trainer[name].data_ptr() for name in seen}
    return {name for name, parameter in trainer.items() if parameter.data_ptr() in told}


def _difference(
    name: str,
    own: Tensor,
    got: Tensor,
    dtype: torch.dtype,
    trainer: Mapping[str, Tensor],
    earlier: Mapping[str, Mapping[str, Tensor]],
) -> ParameterDifference | None:
    if own.shape != got.shape:
        if own.dim() == 2 and _same(own.T, got, dtype):
            return ParameterDifference(name, "transposed", "is transposed", got.numel(), own.numel())
        return ParameterDifference(name, "shape", f"is {tuple(got.shape)}, not {tuple(own.shape)}", got.numel(), own.numel())
    expected = own.to(dtype)
    if _equal(expected.to(got.dtype), got):
        return None
    if got.dtype == own.dtype and _equal(own, got):
        return None
    if _of_one_source(own, got):
        return None
    differing = int((expected.double() != got.double()).sum())
    kind, says = _kind(name, own, expected, got, dtype, trainer, earlier)
    return ParameterDifference(name, kind, says, differing, own.numel())


def _of_one_source(own: Tensor, got: Tensor) -> bool:
    """Whether both can be roundings of the same values, in two formats of which neither holds the other: float16, bfloat16."""
    if {own.dtype, got.dtype} != {torch.float16, torch.bfloat16}:
        return False
    a, b = own.double(), got.double()
    halves = sum(_unit_in_last_place(t) / 2 for t in (own, got))
    overflows = ~a.isfinite() & (b.abs() > torch.finfo(torch.float16).max)
    return bool((((a - b).abs() <= halves) | overflows | (a == b)).all())


def _unit_in_last_place(x: Tensor) -> Tensor:
    info = torch.finfo(x.dtype)
    return torch.exp2(x.double().abs().clamp_min(info.smallest_normal).log2().floor()) * info.eps


def _kind(
    name: str,
    own: Tensor,
    expected: Tensor,
    got: Tensor,
    dtype: torch.dtype,
    trainer: Mapping[str, Tensor],
    earlier: Mapping[str, Mapping[str, Tensor]],
) -> tuple[str, str]:
    if got.dtype != own.dtype and float((got.to(own.dtype) == own).double().mean()) > ROUNDED:
        finer, coarser = (str(t.dtype).removeprefix("torch.") for t in (got, own))
        return "finer", f"is what the trainer's was rounded from: {finer} against {coarser}"
    for other, parameter in trainer.items():
        if other != name and parameter.shape == got.shape and _same(parameter.detach().cpu(), got, dtype):
            return "other_parameter", f"holds the values of {other}"
    if own.dim() == 2 and own.shape[0] == own.shape[1] and _same(own.T, got, dtype):
        return "transposed", "is transposed"
    if (moved := _moved(expected, got)) is not None:
        return "permuted", moved
    for checkpoint, parameters in earlier.items():
        if name in parameters and parameters[name].shape == got.shape and _same(parameters[name].detach().cpu(), got, dtype):
            return "earlier", f"is that of {checkpoint}"
    return _by_value(own, expected, got, dtype)


def _by_value(own: Tensor, expected: Tensor, got: Tensor, dtype: torch.dtype) -> tuple[str, str]:
    x, y = expected.double(), got.double()
    wrong = x != y
    for lower in COARSER:
        kind = getattr(torch, lower)
        if kind != dtype and any(torch.equal(t.to(kind).double()[wrong], y[wrong]) for t in (own, expected)):
            return "cast", f"was cast to {lower}"
    ratio = y[wrong & (x != 0)] / x[wrong & (x != 0)]
    near = 4 * torch.finfo(dtype).eps
    if not bool(y[wrong].any()):
        return "scaled", f"{_where_scaled(wrong)}is zero"
    if (bits := _integer_bits(own, got)) is not None:
        return "quantized", f"was quantized to int{bits[0]}, one scale for each {bits[1]}"
    if (
        ratio.numel()
        and float(ratio.std(unbiased=False)) < near * abs(float(ratio.mean()))
        and abs(float(ratio.mean()) - 1) > near
    ):
        return "scaled", f"{_where_scaled(wrong)}is multiplied by {float(ratio.mean()):.6g}"
    relative = float((y - x).norm() / x.norm().clamp_min(1e-300))
    if _levels(y) <= LEVELS and 2 * _levels(y) < _levels(x):
        return "quantized", f"has {_levels(y)} distinct values in a row, relative error {relative:.2g}"
    rows = int(wrong.flatten(1).any(1).sum()) if wrong.dim() > 1 else int(wrong.sum())
    where = f"{rows:,} of {len(wrong):,} rows differ, relative difference {relative:.2g}"
    return ("stale", f"is of another step: {where}") if relative < CLOSE else ("other_values", f"holds other values: {where}")


def _where_scaled(wrong: Tensor) -> str:
    """Which part of a weight is meant: empty for all of it."""
    if wrong.dim() < 2:
        places = wrong.nonzero().flatten().tolist()
        return (
            ""
            if len(places) > len(wrong) // 2
            else f"value {places[0]} "
            if len(places) == 1
            else f"{len(places)} values from {places[0]} on: each "
        )
    for axis, what in ((0, "row"), (1, "column")):
        lines = wrong.flatten(2).any(2) if wrong.dim() > 2 else wrong
        places = lines.any(1 - axis).nonzero().flatten().tolist()
        if len(places) == 1:
            return f"has one {what} that is not the trainer's: {what} {places[0]} "
        if len(places) < lines.shape[axis] // 2:
            return f"has {len(places)} {what}s that are not the trainer's ({places[0]} to {places[-1]}): each "
    return ""


def _integer_bits(own: Tensor, got: Tensor) -> tuple[int, str] | None:
    """Whether the engine's are the trainer's, rounded to integers times a scale: the bits, and what shares a scale."""
    x, y = own.double(), got.double()
    if x.dim() != 2:
        return None
    for bits in (8, 4):
        for what, top in (("row", x.abs().amax(1, keepdim=True)), ("tensor", x.abs().amax())):
            for levels in (2 ** (bits - 1) - 1, 2 ** (bits - 1)):
                scale = (top / levels).clamp_min(1e-300)
                made = (x / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
                close = (made - y).abs() <= 2 * torch.finfo(got.dtype).eps * y.abs() + 1e-12
                if float(close.double().mean()) > 0.99:
                    return bits, what
    return None


def _moved(expected: Tensor, got: Tensor) -> str | None:
    """Whether it is the same rows (or columns) in another order."""
    for way, a, b in (
        ("rows", expected, got),
        ("columns", expected.mT, got.mT) if expected.dim() == 2 else ("", expected, got),
    ):
        wrong = (a.double() != b.double()).flatten(1).any(1) if a.dim() > 1 else a.double() != b.double()
        places = wrong.nonzero().flatten()
        if not way or not len(places) > 1:
            continue
        first, second = (_sorted(t[places]) for t in (a, b))
        if torch.equal(first, second):
            return f"has {len(places)} {way} in another order, {int(places[0])} to {int(places[-1])}"
    return None


def _sorted(rows: Tensor) -> Tensor:
    """Rows in one order, whatever order they came in."""
    wide = rows.double().reshape(len(rows), -1)
    return torch.from_numpy(wide.numpy()[_lexical(wide)])


def _lexical(wide: Tensor) -> Any:
    import numpy as np

    return np.lexsort(wide[:, :LONGEST_ROW].numpy().T)


def _levels(x: Tensor) -> int:
    """The most distinct values among some rows."""
    rows = x.reshape(-1, x.shape[-1])[:: max(1, x.shape[0] // 8)]
    return max(int(row.unique().numel()) for row in rows)


def _same(own: Tensor, got: Tensor, dtype: torch.dtype) -> bool:
    return own.shape == got.shape and _equal(own.to(dtype).to(got.dtype), got)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign of a zero; values that are no numbers equal one another."""
    return bool(torch.equal(a, b)) or bool(((a == b) | (a.isnan() & b.isnan())).all())

"""The fourth rung: every parameter of the engine against the trainer's, bit for bit, and what those that differ look like.

A cast of all weights to the dtype that the engine computes in is what was asked for, and no defect. Everything else is. The
classes are asked in order of how exactly they can be shown: what the trainer's was rounded from, the bits of another
parameter, the transpose, the same rows in another order, the bits of an earlier checkpoint, one factor, values of a coarser
dtype, few distinct values in a row. What is left and still close is `stale`: weights of another step.

Where the two sides are processes that share no memory, digests are compared first (`DigestComparison`), and only what differs
is sent.
"""

from __future__ import annotations

import hashlib
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
    """finer, shape, other_parameter, transposed, permuted, earlier, scaled, cast, quantized, stale, other_values."""
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
) -> dict[str, Any]:
    """Hold all parameters against each other.

    Args:
        trainer: By name, on any device.
        engine: Name and values, one after another.
        dtype: In which the engine computes.
        earlier: Parameters of earlier checkpoints by their name: which of them a stale weight is of.
    """
    found: list[ParameterDifference] = []
    seen: set[str] = set()
    unknown: list[str] = []
    cast = 0
    for name, got in engine:
        if name not in trainer:
            unknown.append(name)
            continue
        seen.add(name)
        own = trainer[name].detach().cpu()
        cast += own.dtype != got.dtype
        difference = _difference(name, own, got, dtype, trainer, earlier or {})
        if difference is not None:
            found.append(difference)
    missing = sorted(set(trainer) - seen - _tied(trainer, seen))
    return {
        "compared": len(seen),
        "cast": cast if dtype != _dtype(trainer) else 0,
        "engine_dtype": str(dtype).removeprefix("torch."),
        "differing": [d.to_dict() for d in found],
        "not_told": missing,
        "unknown": unknown,
    }


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
    differing = int((expected.double() != got.double()).sum())
    kind, says = _kind(name, own, expected, got, dtype, trainer, earlier)
    return ParameterDifference(name, kind, says, differing, own.numel())


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
    if (
        ratio.numel()
        and float(ratio.std(unbiased=False)) < near * abs(float(ratio.mean()))
        and abs(float(ratio.mean()) - 1) > near
    ):
        return "scaled", f"is multiplied by {float(ratio.mean()):.6g}"
    relative = float((y - x).norm() / x.norm().clamp_min(1e-300))
    if _levels(y) <= LEVELS and 2 * _levels(y) < _levels(x):
        return "quantized", f"has {_levels(y)} distinct values in a row, relative error {relative:.2g}"
    rows = int(wrong.flatten(1).any(1).sum()) if wrong.dim() > 1 else int(wrong.sum())
    where = f"{rows:,} of {len(wrong):,} rows differ, relative difference {relative:.2g}"
    return ("stale", f"is of another step: {where}") if relative < CLOSE else ("other_values", f"holds other values: {where}")


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

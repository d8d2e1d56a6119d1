"""Stage 5: every parameter of the engine against the trainer's, bit for bit, and how those that differ are related.

A cast of all weights to the dtype that the engine computes in is what was asked for, and no defect. Everything else is. The
classes are tried in order of how exactly they can be shown: the values that the trainer's were rounded from, the bits of
another parameter, the transpose, the same rows in another order, the bits of an earlier checkpoint, values of a coarser dtype,
integers or float8 times a scale, one factor. The rest, if still close, is `stale`: mostly of another step, and said with that
doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shaketable.mismatch.results import ParameterDifference, Weights

COARSER = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
CLOSE = 0.5
"""Weights of another step: the difference is smaller than this, relative to the weights."""
SORTED_BY = 8
"""Values of a row by which rows are put in order."""
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
        pair = _Pair(name, torch.atleast_1d(trainer[name].detach().cpu()), torch.atleast_1d(got), dtype)
        cast += pair.own.dtype != got.dtype
        if pair.holds(pair.own) or (pair.own.dtype == got.dtype and _is_equal(pair.own, got)):
            continue
        if _is_of_one_source(pair.own, got):
            if other_source is not None:
                other_source[name] = got
            continue
        found.append(ParameterDifference(name, *_relation(pair, trainer, earlier or {})))
    pointers = {trainer[name].data_ptr() for name in seen}
    missing = sorted(name for name, own in trainer.items() if name not in seen and own.data_ptr() not in pointers)
    biases = [name for name in missing if _is_bias_alone(name, trainer, missing) and bool(trainer[name].any())]
    absent = [ParameterDifference(name, "missing", "is missing: the engine computes without it") for name in biases]
    return Weights(
        compared=len(seen),
        cast=cast if dtype != next(iter(trainer.values())).dtype else 0,
        differing=absent + found,
        engine_dtype=str(dtype).removeprefix("torch."),
        missing=[name for name in missing if name not in biases],
        unknown=unknown,
    )


def _is_bias_alone(name: str, trainer: Parameters, missing: list[str]) -> bool:
    """Whether this is a bias that the engine lacks, though it gives the weight beside it."""
    weight = f"{name.removesuffix('.bias')}.weight"
    return name.endswith(".bias") and weight in trainer and weight not in missing


@dataclass(frozen=True)
class _Pair:
    """One parameter on both sides, and the dtype that the engine computes in."""

    name: str
    own: Tensor
    got: Tensor
    dtype: torch.dtype

    def holds(self, weight: Tensor) -> bool:
        """Whether the engine holds these values, cast to its dtype."""
        return _is_equal(torch.atleast_1d(weight.detach().cpu()).to(self.dtype).to(self.got.dtype), self.got)


def _relation(pair: _Pair, trainer: Parameters, earlier: Mapping[str, Parameters]) -> tuple[str, str]:
    """The first class that fits, and how it is said."""
    own, got, dtype = pair.own, pair.got, pair.dtype
    if own.dim() == 2 and pair.holds(own.T):
        return "transposed", "is transposed"
    if own.shape != got.shape:
        return "shape", f"is {tuple(got.shape)}, not {tuple(own.shape)}"
    if got.dtype != own.dtype and float((got.to(own.dtype) == own).double().mean()) > ROUNDED:
        finer, coarser = (str(t.dtype).removeprefix("torch.") for t in (got, own))
        return "finer", f"is what the trainer's was rounded from: {finer} against {coarser}"
    for other, parameter in trainer.items():
        if other != pair.name and pair.holds(parameter):
            return "other_parameter", f"holds the values of {other}"
    x, y = own.to(dtype).double(), got.double()
    wrong = x != y
    rows = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist()
    unit = {1: "value", 2: "row"}.get(wrong.dim(), "expert")
    if len(rows) > 1 and np.array_equal(_in_order(x[rows]), _in_order(y[rows])):
        return "permuted", f"has {len(rows)} {unit}s in another order, {rows[0]} to {rows[-1]}"
    for checkpoint, parameters in earlier.items():
        if pair.name in parameters and pair.holds(parameters[pair.name]):
            return "earlier", f"is that of {checkpoint}"
    for lower in COARSER:
        if lower != dtype and any(torch.equal(t.to(lower).double()[wrong], y[wrong]) for t in (own, own.to(dtype))):
            return "cast", f"was cast to {str(lower).removeprefix('torch.')}"
    where = ""
    if len(rows) == 1:
        where = f"has one {unit} that is not the trainer's: {unit} {rows[0]} "
    elif len(rows) <= len(wrong) // 2:
        where = f"has {len(rows)} {unit}s that are not the trainer's ({rows[0]} to {rows[-1]}): each "
    if not bool(y[wrong].any()):
        return "scaled", f"{where}is zero"
    for source in (own.double(), x):
        if (name := _format(source, y, wrong, torch.finfo(got.dtype).eps)) is not None:
            return "quantized", f"was quantized to {name}"
    ratio = y[wrong & (x != 0)] / x[wrong & (x != 0)]
    near = max(4 * torch.finfo(dtype).eps, STEP)
    factor = float(ratio.mean()) if ratio.numel() else 1.0
    if abs(factor - 1) > near and float(ratio.std(unbiased=False)) < near * abs(factor):
        return "scaled", f"{where}is multiplied by {factor:.6g}"
    relative = float((y - x).norm() / x.norm().clamp_min(1e-300))
    which = f" ({', '.join(map(str, rows))})" if unit == "expert" and len(rows) < min(len(wrong), 9) else ""
    differ = f"{len(rows):,} of {len(wrong):,} {unit}s differ{which}, relative difference {relative:.2g}"
    if relative < CLOSE:
        return "stale", f"holds close values, of another step or in another format: {differ}"
    return "other_values", f"holds other values: {differ}"


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign of a zero; NaNs equal one another."""
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _is_of_one_source(own: Tensor, got: Tensor) -> bool:
    """Whether both can be roundings of the same values, in two formats of which neither holds the other: float16, bfloat16."""
    if own.shape != got.shape or {own.dtype, got.dtype} != {torch.float16, torch.bfloat16}:
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


def _in_order(weight: Tensor) -> np.ndarray:
    rows: np.ndarray = weight.reshape(len(weight), -1).numpy()
    return rows[np.lexsort(rows[:, :SORTED_BY].T)]

"""Stage 5: every parameter of the engine against the trainer's, bit for bit, and how those that differ are related.

A cast of all weights to the dtype that the engine computes in is what was asked for, and no defect. Everything else is. A cause
is named where the bits show it: those of another parameter, of an earlier checkpoint, or of a coarser dtype. Any other
difference is told by its rows and its size; close values are called `stale`, mostly of another step, and said with that doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shaketable.mismatch.results import ParameterDifference, Weights

COARSER = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
CLOSE = 0.5
"""Weights of another step: the difference is smaller than this, relative to the weights."""
NAMED = 8
"""Rows that are named one by one."""
Parameters = Mapping[str, Tensor]


def compare(
    trainer: Parameters,
    engine: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    earlier: Mapping[str, Parameters] | None = None,
    other_source: dict[str, Tensor] | None = None,
) -> Weights:
    """Compare all parameters with those of an engine that computes in a dtype.

    `earlier` has parameters of earlier checkpoints, by the checkpoint's name. `other_source` receives the engine's weights that
    were not rounded from the trainer's, but from their source.
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
    if own.shape != got.shape:
        return "shape", f"is {tuple(got.shape)}, not {tuple(own.shape)}"
    for other, parameter in trainer.items():
        if other != pair.name and pair.holds(parameter):
            return "other_parameter", f"holds the values of {other}"
    for checkpoint, parameters in earlier.items():
        if pair.name in parameters and pair.holds(parameters[pair.name]):
            return "earlier", f"is that of {checkpoint}"
    x, y = own.to(dtype).double(), got.double()
    wrong = x != y
    for lower in COARSER:
        if lower != dtype and any(torch.equal(t.to(lower).double()[wrong], y[wrong]) for t in (own, own.to(dtype))):
            return "cast", f"was cast to {str(lower).removeprefix('torch.')}"
    rows = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist()
    unit = {1: "value", 2: "row"}.get(wrong.dim(), "expert")
    which = ""
    if len(rows) < len(wrong):
        which = f" ({', '.join(map(str, rows))})" if len(rows) <= NAMED else f" ({rows[0]} to {rows[-1]})"
    relative = float((y - x).norm() / x.norm().clamp_min(1e-300))
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

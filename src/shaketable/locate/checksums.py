"""Checksums of matrix products (algorithm-based fault tolerance): a cheap screen.

The sum of a product's outputs is the product with the summed weights: with y = x wᵀ and any vector r, y·r = x·(wᵀr),
and with any vector s over tokens, sᵀy = (sᵀx)·wᵀ. Two vectors each way: ones, and signs. A result may differ by its
rounding: the standard deviation of one value is σ = u|y|/√3 + 3ua‖x‖‖w‖, of a sum the root of the summed squares; six
of them are the threshold. A fault that cancels in a sum, or drowns in the rounding of its neighbours, is not seen:
replay decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shaketable.locate.intervals import ACCUMULATION, UNIT, Precision
from shaketable.locate.leaves import Leaf
from shaketable.locate.record import Recording, tensors_of
from shaketable.locate.reference import Reference

THRESHOLD = 6.0


def check_products(recording: Recording, reference: Reference, prefix: str, precision: Precision) -> dict[str, float]:
    """Row and column checksums of every linear leaf of a recording: the worst, in units of its threshold."""
    scores: dict[str, float] = {}
    for record in recording.records:
        full = f"{prefix}.{record.path}"
        leaf = reference.leaf(full) if record.func is None else None
        if leaf is not None and leaf.kind in ("linear", "conv1d"):
            x, y = next(tensors_of((record.args, record.kwargs))), next(tensors_of(record.output))
            scores[record.path] = _score(x.detach().cpu(), y.detach().cpu(), leaf, full, reference, precision)
    return scores


def _score(x: Tensor, y: Tensor, leaf: Leaf, full: str, reference: Reference, precision: Precision) -> float:
    w = reference.wide(reference.weight(f"{full}.weight"))
    w = w if leaf.kind == "linear" else w.T
    bias = reference.weight(f"{full}.bias") if leaf.module._parameters.get("bias") is not None else None
    rows, wide, spread = _spread(x, y, w, bias, precision)
    down = _signs(rows.shape[0])
    by_column = (down.T @ wide - (down.T @ rows) @ w.T).abs() / _limit(spread.sum(0, keepdim=True))
    worst = torch.stack([_by_row(rows, wide, spread, w).max(), by_column.max()]).max()
    return float(worst.nan_to_num(nan=float("inf")))


def row_scores(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> Tensor:
    """The row checksums of x @ wᵀ + bias, one per token, in units of their threshold.

    The variances of a row are summed in closed form, a little too large: (a + b)² ≤ 2a² + 2b².
    """
    rows, wide = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1]).double()
    rounding = UNIT[y.dtype] / 3**0.5 * wide.norm(dim=1)
    order = (3 * ACCUMULATION + 2 * precision.product_input) * rows.norm(dim=1) * w.norm()
    across = _signs(w.shape[0])
    shift = 0.0 if bias is None else bias.double() @ across
    off = (wide @ across - shift - rows @ (across.T @ w.double()).T).abs().amax(1)
    scores: Tensor = off / _limit(2 * (rounding.square() + order.square()))
    return scores.nan_to_num(nan=float("inf"))


def _by_row(rows: Tensor, wide: Tensor, spread: Tensor, w: Tensor) -> Tensor:
    across = _signs(w.shape[0])
    return (wide @ across - rows @ (across.T @ w.double()).T).abs() / _limit(spread.sum(1, keepdim=True))


def _spread(x: Tensor, y: Tensor, w: Tensor, bias: Tensor | None, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and results in float64, a row per token, and the variance of each result's rounding."""
    rows, wide = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, y.shape[-1]).double()
    wide = wide if bias is None else wide - bias.double()
    inexact = 3 * ACCUMULATION + 2 * precision.product_input
    reach = (inexact * rows.norm(dim=1, keepdim=True)).float() * w.norm(dim=1).float()
    spread = reach.add_(y.reshape(-1, y.shape[-1]).float().abs(), alpha=UNIT[y.dtype] / 3**0.5).square_()
    return rows, wide, spread


def _limit(variance: Tensor) -> Tensor:
    return THRESHOLD * variance.double().sqrt() + 1e-30


def _signs(n: int) -> Tensor:
    """A column of ones and a column of random signs."""
    signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n)).double() * 2 - 1
    return torch.stack([torch.ones(n, dtype=torch.float64), signs], 1)

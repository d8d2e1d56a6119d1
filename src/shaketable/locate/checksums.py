"""Checksums of matrix products (algorithm-based fault tolerance): a cheap look at every row.

The sum of a product's outputs is the product with the summed weights: with y = x wᵀ and any vector r, y·r = x·(wᵀr),
and with any vector s over tokens, sᵀy = (sᵀx)·wᵀ. r and s are random, between 1 and 1.5 in size, of either sign: two
channels or tokens that changed places change the sum, and so does any other error, but for a coincidence.

A result may differ by its rounding: a standard deviation of u|y|/√3 for the value itself and 3ua‖x‖‖w‖ for the order of
summation; of a sum, the root of the summed squares; six of them are the threshold. An error drowns in the rounding of
its neighbours, so a row is summed sixteen channels at a time: in float32 the threshold is then about the width of the
rounding interval of a single value. What fires is replayed: a checksum by itself blames nobody.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shaketable.capture.recorder import Recording
from shaketable.capture.reference import Reference
from shaketable.numerics.intervals import ACCUMULATION, UNIT, Precision
from shaketable.numerics.leaf_modules import Leaf
from shaketable.numerics.precision import host_arithmetic
from shaketable.sites.nested_tensors import tensors_of

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

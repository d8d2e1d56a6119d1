"""Statistics of a layer that need no second device (SRDD). They are shown and they guide AQN; they never decide.

A layer is called with the input x of the trace; y is its answer. docs/locate.md says what each number shows.
Values that are not finite are left out everywhere. All is computed in float64; a statistic that is not defined (nothing finite,
zero spread) is nan. What is added to x is taken as it reached the layer, after rounding to its dtype: x' − x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shaketable.faults.sums import with_float64
from shaketable.locate.diagnosis import LayerStatistics

QUANTILE = 0.001

Floats = npt.NDArray[np.float64]


def probe_input(x: Tensor, seed: int, scale: float = 0.1) -> Tensor:
    """`x` plus Gaussian noise with `scale` times the std of `x`, from a generator of its own: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator).mul_(scale * _std(_finite(x)))
    probed = noise.add_(x.detach().cpu())
    return probed.to(x.dtype).to(x.device)


def dc_input(x: Tensor, scale: float = 0.1) -> Tensor:
    """`x` plus the constant `scale` times the std of `x`."""
    shifted = x.detach().cpu().double() + scale * _std(_finite(x))
    return shifted.to(x.dtype).to(x.device)


def layer_statistics(
    x: Tensor, outputs: Sequence[Tensor], probed_x: Tensor, probed_y: Tensor, dc_x: Tensor, dc_y: Tensor
) -> LayerStatistics:
    """The statistics of one layer, from inputs (batch, tokens, channels) and its answers to them.

    `outputs` are the answers to the same call repeated; with only one, instability is nan.
    """
    y = _finite(outputs[0])
    return LayerStatistics(
        gain=_ratio(_std(_change(probed_y, outputs[0])), _std(_change(probed_x, x))),
        min_gain=_min_gain(_change(dc_y, outputs[0]).abs(), _change(dc_x, x).abs()),
        kurtosis=_kurtosis(y),
        instability=_instability(outputs),
        pile_up=_pile_up(y),
        distinct=_distinct(y),
    )


def note_drops(statistics: Sequence[LayerStatistics]) -> None:
    """Set `drop_z` of these layers, in order of computation."""
    kurtosis = np.array([s.kurtosis for s in statistics], dtype=np.float64)
    peaks = np.log(np.maximum(kurtosis + 3, 1.0))
    falls = np.nan_to_num(np.diff(peaks, prepend=peaks[:1]))
    for layer, z in zip(statistics, _robust_z(falls).tolist(), strict=True):
        layer.drop_z = z


def _robust_z(values: Floats) -> Floats:
    """z by median and MAD: (v − median) over 1.4826·max(MAD, 0.01·|median|, 1e-6)."""
    median = np.median(values)
    spread = max(float(np.median(np.abs(values - median))), 0.01 * abs(float(median)), 1e-6)
    return (values - median) / (1.4826 * spread)


def _double(t: Tensor) -> Tensor:
    """Flat and in float64, on the tensor's device where all of its kind have float64."""
    return with_float64(t.detach().flatten()).double()


def _finite(t: Tensor) -> Tensor:
    return _finite_ones(_double(t))


def _change(after: Tensor, before: Tensor) -> Tensor:
    return _finite_ones(_double(after) - _double(before))


def _finite_ones(values: Tensor) -> Tensor:
    """Without NaNs; where there are none, as usual, this costs one sum."""
    return values if math.isfinite(float(values.sum())) else values[values.isfinite()]


def _std(values: Tensor) -> float:
    return float((values - values.mean()).square().mean().sqrt()) if values.numel() else math.nan


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else math.nan


def _ratio(over: float, under: float) -> float:
    ratio = over / under if under > 0 else math.nan
    return ratio if math.isfinite(ratio) else math.nan


def _min_gain(response: Tensor, bias: Tensor) -> float:
    """By kthvalue: torch.quantile refuses more than 2^24 values. One b for all: the median, as rounding swallows a few."""
    if not response.numel() or not bias.numel():
        return math.nan
    rank = 1 + int(QUANTILE * (response.numel() - 1))
    return _ratio(float(response.kthvalue(rank).values), float(bias.median()))


def _kurtosis(values: Tensor) -> float:
    """Scaled by the largest value first: fourth powers of large float32 values leave even float64."""
    if not values.numel() or values.min() == values.max():
        return math.nan
    centred = values / values.abs().max()
    square = (centred - centred.mean()).square()
    return _ratio(float(square.square().mean()), float(square.mean()) ** 2) - 3


def _instability(outputs: Sequence[Tensor]) -> float:
    """Differences to the first answer, so that equal answers give exactly zero."""
    if len(outputs) > 1 and all(torch.equal(y, outputs[0]) for y in outputs[1:]):
        return 0.0
    first = _double(outputs[0])
    change = torch.stack([_double(y) - first for y in outputs])
    kept = change.isfinite().all(dim=0)
    if len(outputs) < 2 or not kept.any():
        return math.nan
    spread = _rms(change[:, kept].std(dim=0))
    return _ratio(spread, _rms(first[kept])) if spread else 0.0


def _distinct(values: Tensor) -> int:
    """By numpy, which sorts many times faster on a CPU."""
    ordered = np.sort(values.cpu().float().numpy())
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + 1 if ordered.size else 0


def _pile_up(values: Tensor) -> float:
    if not values.numel():
        return math.nan
    return float(((values == values.min()) | (values == values.max())).double().mean())

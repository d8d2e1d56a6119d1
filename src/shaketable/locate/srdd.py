"""Statistics of a layer that need no second device (SRDD). They are shown and they guide AQN; they never decide.

A layer is called with the input x of the trace; y is its answer. Non-finite values are left out everywhere: what a layer
does to them is another probe's business. All is computed in float64; a statistic that is not defined (nothing finite,
zero spread) is nan.

    gain         std(f(x + e) − y) / std(e), e Gaussian with std 0.1·std(x). A residual layer has about 1, a dead zone about 0.
    min_gain     the 0.001 quantile of |f(x + b) − y| / b for a constant b = 0.1·std(x): the channels that answer least.
    kurtosis     m4 / m2² − 3 of y (scipy's default). A saturation cuts the peaks off, so it drops.
    instability  rms over values of the std over two calls, relative to rms(y). Zero on a deterministic device;
                 relative noise of scale s on the layer's output gives s.
    pile_up      share of values equal to the smallest or the largest one. A clamp piles values up there; else about 2/n.
    distinct     number of different values. Low precision and stuck bits leave few.

e and b are what reached the layer after rounding to its dtype, x' − x, and not what was asked for.

What SRDD alone would say (`srdd_verdict`) is the baseline that the tests with a verdict are compared with. Tests in order,
the first that fires blames, every layer may be blamed:

    z            (v − median) / (1.4826·max(MAD, 0.01·|median|, tiny)); an edge or outlier has |z| > 2 (published).
    instability  global anomaly when every layer is unstable and none more than 5 times the quietest: nobody is blamed. Else
                 the first layer above 5 times the quietest whose rise over the layer before has z > 2. (Published:
                 instability > 0.1. Here layers are called teacher-forced, so a healthy layer has exactly 0.)
    gain         the lowest one, when it is below 0.1, or has z < −2 and is below 0.8 of the median (0.8: the origin's line
                 for low gain in AQN guidance; published is z < −2 alone, which blames layers of a healthy SmolLM2 that
                 have 0.93 of the median).
    kurtosis     the sharpest fall of log(kurtosis + 3) from one layer to the next, when z < −2. (Published: log of the excess
                 kurtosis floored at 1e-4, which jumps on Gaussian outputs; for peaked ones the two agree.) Layer 0 has no
                 layer before it and no edge.
    pile-up      the layer with the largest share, when it is above 10 times the median and z > 2.

min_gain and distinct take no part. The published order scores low gain before kurtosis and excludes the two first and
the two last layers; the exclusion is dropped, for faults do not keep to the middle.

The variance–gain theorem, corrected. The origin claims that a fault which keeps determinism and linearity cannot be
told from other weights by watching one device: if the device answers D·W·x for W·x, then W' = D·W on a healthy device
gives the same answers to all inputs. That holds only when the weights are unknown. The file holds them: a host computes
W·x, and the answer is inside its rounding interval or it is not. And without a host: a gauge twin asks the device to
compute the same function with other numbers. For an exact symmetry G, a healthy device answers the twin with G·W·x to
the last bit; the faulty one answers D·G·W·x where its own answer, re-gauged, is G·D·W·x. They differ unless D and G
commute on that answer. So what one device cannot show by itself is what commutes with every gauge used: a gain on all
channels, for instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shaketable.faults.sums import with_float64

QUANTILE = 0.001
Z = 2.0
AMBIENT_SPREAD = 5.0
DEAD_GAIN = 0.1
LOW_GAIN = 0.8
PILE = 10.0

Floats = npt.NDArray[np.float64]
Blame = tuple[int, str] | None


@dataclass(frozen=True)
class LayerStatistics:
    """The six numbers of one layer; the module's docstring defines them."""

    gain: float
    min_gain: float
    kurtosis: float
    instability: float
    pile_up: float
    distinct: int

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name; what is not defined stays nan."""
        return asdict(self)


class Edges(TypedDict):
    """Change from the layer before, per layer: log ratio of the kurtosis, difference of the instability."""

    kurtosis: list[float]
    instability: list[float]


class SrddVerdict(TypedDict):
    """What SRDD alone would say."""

    blames: int | None
    why: str
    global_anomaly: bool
    edges: Edges


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


def gain(x: Tensor, y: Tensor, probed_x: Tensor, probed_y: Tensor) -> float:
    """The gain of one probe."""
    return _ratio(_std(_change(probed_y, y)), _std(_change(probed_x, x)))


def layer_statistics(
    x: Tensor, outputs: Sequence[Tensor], probed_x: Tensor, probed_y: Tensor, dc_x: Tensor, dc_y: Tensor
) -> LayerStatistics:
    """The statistics of one layer from the calls made on it.

    Args:
        x: The layer's input, (batch, tokens, channels), any floating dtype.
        outputs: Its answers to `x`, the same call repeated; one at least, and instability is nan with only one.
        probed_x: `probe_input(x, …)`.
        probed_y: The answer to it.
        dc_x: `dc_input(x)`.
        dc_y: The answer to it.
    """
    y = _finite(outputs[0])
    return LayerStatistics(
        gain=gain(x, outputs[0], probed_x, probed_y),
        min_gain=_min_gain(_change(dc_y, outputs[0]).abs(), _change(dc_x, x).abs()),
        kurtosis=_kurtosis(y),
        instability=_instability(outputs),
        pile_up=_pile_up(y),
        distinct=_distinct(y),
    )


def srdd_verdict(statistics: Sequence[LayerStatistics]) -> SrddVerdict:
    """What SRDD alone would say of these layers, in order of computation."""
    instability = np.nan_to_num(np.array([s.instability for s in statistics], dtype=np.float64))
    peaks = np.log(np.maximum(np.array([s.kurtosis for s in statistics], dtype=np.float64) + 3, 1.0))
    falls = np.nan_to_num(np.diff(peaks, prepend=peaks[:1]))
    rises = np.diff(instability, prepend=0.0)
    everywhere = _global_anomaly(instability)
    blame = None
    if not everywhere:
        blame = (
            _blame_instability(instability, rises)
            or _blame_gain(np.array([s.gain for s in statistics], dtype=np.float64))
            or _blame_kurtosis(falls)
            or _blame_pile_up(np.array([s.pile_up for s in statistics], dtype=np.float64))
        )
    layer, why = blame or (
        None,
        "every layer is unstable, none much more than the others" if everywhere else "nothing stands out",
    )
    edges = Edges(kurtosis=falls.tolist(), instability=rises.tolist())
    return SrddVerdict(blames=layer, why=why, global_anomaly=everywhere, edges=edges)


def _double(t: Tensor) -> Tensor:
    """Flat and in float64, on the tensor's device where all of its kind have float64."""
    return with_float64(t.detach().flatten()).double()


def _finite(t: Tensor) -> Tensor:
    return _finite_ones(_double(t))


def _change(after: Tensor, before: Tensor) -> Tensor:
    return _finite_ones(_double(after) - _double(before))


def _finite_ones(values: Tensor) -> Tensor:
    """Without the values that are no numbers; the usual case, that there are none, costs one sum."""
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


def _robust_z(values: Floats, tiny: float = 1e-6) -> Floats:
    """z by median and MAD of what is finite; nan stays nan, which is beyond no threshold."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.zeros_like(values)
    median = np.median(finite)
    spread = max(float(np.median(np.abs(finite - median))), 0.01 * abs(float(median)), tiny)
    return (values - median) / (1.4826 * spread)


def _global_anomaly(instability: Floats) -> bool:
    return bool(instability.size and 0 < instability.max() <= AMBIENT_SPREAD * instability.min())


def _blame_instability(instability: Floats, rises: Floats) -> Blame:
    """Falls are set to zero: after a teacher-forced faulty layer the instability is gone again, and is no news."""
    if not instability.size:
        return None
    edge = (_robust_z(np.maximum(rises, 0), tiny=1e-30) > Z) & (instability > AMBIENT_SPREAD * instability.min())
    if not edge.any():
        return None
    layer = int(edge.argmax())
    return layer, f"instability rises to {instability[layer]:.2g} at layer {layer}"


def _blame_gain(gains: Floats) -> Blame:
    if not np.isfinite(gains).any():
        return None
    layer = int(np.nanargmin(gains))
    gain, median = gains[layer], np.nanmedian(gains)
    if gain < DEAD_GAIN or (_robust_z(gains)[layer] < -Z and gain < LOW_GAIN * median):
        return layer, f"gain is {gain:.2g} at layer {layer}, the median is {median:.2g}"
    return None


def _blame_kurtosis(falls: Floats) -> Blame:
    if not falls.size:
        return None
    layer = int(falls.argmin())
    if falls[layer] < 0 and _robust_z(falls)[layer] < -Z:
        return layer, f"kurtosis falls by a factor {math.exp(-falls[layer]):.3g} at layer {layer}"
    return None


def _blame_pile_up(shares: Floats) -> Blame:
    if not np.isfinite(shares).any():
        return None
    layer = int(np.nanargmax(shares))
    if shares[layer] > PILE * np.nanmedian(shares) and _robust_z(shares)[layer] > Z:
        return layer, f"{shares[layer]:.2%} of the values of layer {layer} sit at the largest or smallest one"
    return None

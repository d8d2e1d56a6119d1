"""Which error model turned one tensor into another: the best by likelihood, and how good it is.

Every candidate says what the faulty value is given the clean one, up to Gaussian noise of variance

    v_i = s²·h_i² + φ_i²,    φ_i² = u²·(c_i² + m_i²)/3 + (2·ua·rms(c))²

where c is the clean value, m the candidate's prediction, u the unit roundoff of the dtype and ua = 2^-24 that of sums inside
of a kernel: φ is what two correct devices may differ by, and no candidate is rewarded for explaining more than that.

    rounding            m = c                             s = 0
    relative_gaussian   m = c                             h = |c|, s is the magnitude
    absolute_gaussian   m = c                             h = 1,   s is the magnitude
    gain                m = c·(1 + g)                     h = 1,   s is what is left over
    systematic_bias     m = c + b·sign(c)                 the same
    bias                m = c + b·std(c)                  the same
    dead_zone           m = 0 where |c| < t·max|c|        the same; the maximum over tensor, token or block of 32
    saturation          m = c cut at ±t·max|c|            the same

Each candidate is tried on all channels and, where only some channels are wrong, on those alone, at the price of naming them:
log C(channels, wrong ones). The smallest BIC wins; a prediction must explain half of the error's variance, since a plan injects
the prediction and not what it leaves over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shaketable.faults import FaultBase, make_fault
from shaketable.faults.clipping import Scope, top
from shaketable.faults.noise import rms, spread
from shaketable.numerics.intervals import ACCUMULATION, UNIT


def dead_zone(part: Tensor, c: Tensor, f: Tensor) -> float:
    """The t for which f is best described by c, and 0 where part < t; halfway between two values.

    Values below cost f², those above (f − c)².
    """
    order = part.sort()
    below, above = f.square()[order.indices].cumsum(0), (f - c).square()[order.indices]
    cost = below + (above.sum() - above.cumsum(0))
    last = int(cost.argmin())
    low = float(order.values[last])
    high = float(order.values[last + 1]) if last + 1 < len(cost) else low
    return min(1.0, (low + high) / 2 if high > low else low * (1 + 1e-6))


def saturation(part: Tensor, ceiling: Tensor, c: Tensor, f: Tensor) -> float:
    """The t for which f is best described by c cut at ±t·ceiling.

    With the k largest cut, t = Σ f·ceiling / Σ ceiling², kept between the k-th value and its neighbour.
    """
    order = part.sort(descending=True)
    size, u = (f * c.sign())[order.indices], ceiling[order.indices]
    d = (f - c).square()[order.indices]
    fu, uu, ff = (size * u).cumsum(0), u.square().cumsum(0), f.square()[order.indices].cumsum(0)
    low = torch.cat([order.values[1:], order.values.new_zeros(1)])
    t = torch.minimum(torch.maximum(fu / uu.clamp_min(1e-300), low), order.values)
    cost = ff - 2 * t * fu + t.square() * uu + (d.sum() - d.cumsum(0))
    return float(t[int(cost.argmin())])


# ---- fit


ROUNDING = "rounding"
NOISE = ("relative_gaussian", "absolute_gaussian")
SCOPES: tuple[Scope, ...] = ("tensor", "token", "block")
BLOCK = 32
LIMIT = 2**17
"""Values that are looked at; more cost time and tell nothing new."""
STEPS = 12
"""Steps of Fisher scoring; it converges in about five."""
LOUD = 4.0
"""A channel is wrong when its error is this many times what rounding makes."""
TELLING = 0.5
"""A prediction must explain more of the error's variance than this."""
DENSE = 0.9
"""From this share of wrong channels on, all of them are taken as wrong."""


@dataclass(frozen=True)
class Fit:
    """One error model of one site, and how well it fits."""

    kind: str
    """A fault of the plan language, or `rounding`: nothing beyond what the dtype does."""
    magnitude: float
    """As the fault takes it; may be negative, which the plan language cannot say."""
    params: dict[str, Any]
    values: int
    log_gain: float
    """Log-likelihood over that of rounding, in nats."""
    bic: float
    explained: float
    """Share of the error's variance that the prediction explains; noise predicts no single error."""
    ks: float
    """Kolmogorov–Smirnov distance from the normal of the standardised residuals, signed as the clean values are: an error
    that always points away from zero, or toward it, is not noise."""

    @property
    def fault(self) -> FaultBase | None:
        """The fault to inject; None where there is nothing to inject, or no fault says it."""
        if self.kind == ROUNDING or self.magnitude <= 0:
            return None
        return make_fault({"kind": self.kind, "magnitude": float(f"{self.magnitude:.6g}"), **self.params})

    @property
    def is_good(self) -> bool:
        """Whether noise is really normal, or a prediction really explains the error."""
        if self.kind == ROUNDING:
            return True
        return self.ks < 0.1 if self.kind in NOISE else self.explained > 0.8

    def goodness(self) -> str:
        """The goodness in words."""
        quality = f"KS {self.ks:.3f}" if self.kind in NOISE else f"{self.explained:.1%} of the error's variance explained"
        poor = "" if self.is_good else ", a poor fit"
        return f"{quality}, log-likelihood +{self.log_gain:.4g} over rounding, {self.values} values{poor}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        fault = self.fault
        return {
            "kind": self.kind,
            "magnitude": self.magnitude,
            "params": self.params,
            "values": self.values,
            "log_gain": self.log_gain,
            "bic": self.bic,
            "explained": self.explained,
            "ks": self.ks,
            "good": self.is_good,
            "fault": None if fault is None else fault.text(),
        }


def fit_all(clean: Tensor, faulty: Tensor, unit: float | None = None) -> list[Fit]:
    """Every candidate, the best first; empty when no pair of values is finite.

    Args:
        clean: What a good device made.
        faulty: The other device's result for the same input.
        unit: Unit roundoff of the coarser of both dtypes; that of `clean` by default.
    """
    pair = _Pair.of(clean.detach().cpu(), faulty.detach().cpu(), UNIT[clean.dtype] if unit is None else unit)
    if pair is None:
        return []
    null = pair.score(_Guess(ROUNDING, pair.c, None, 0))
    guesses = list(_guesses(pair, None))
    lanes = pair.wrong_lanes()
    if lanes is not None:
        guesses += _guesses(pair, lanes)
    fits = [pair.fit(guess, null) for guess in (_Guess(ROUNDING, pair.c, None, 0), *guesses)]
    return sorted((f for f in fits if f.kind in (ROUNDING, *NOISE) or f.explained > TELLING), key=lambda f: f.bic)


@dataclass(frozen=True)
class _Guess:
    """A candidate: its prediction, and the shape of its noise."""

    kind: str
    mean: Tensor
    shape: Tensor | None
    """h; None when there is no noise beyond rounding."""
    parameters: int
    magnitude: float | None = None
    """None when it is the noise's own scale."""
    params: dict[str, Any] = field(default_factory=dict)
    lanes: Tensor | None = None


@dataclass(frozen=True)
class _Score:
    log_likelihood: float
    scale: float
    deviation: Tensor
    """Standard deviation of every value."""


@dataclass(frozen=True)
class _Pair:
    """Both tensors in float64, in units of the clean one's rms, with NaNs taken as clean zeros."""

    raw: Tensor
    """The clean values in their own dtype: maxima are taken from them, as the fault does."""
    peak: Tensor
    """The largest of the whole tensor, and its standard deviation, whatever rows are looked at."""
    spread: float
    c: Tensor
    f: Tensor
    size: float
    roundoff: float

    @classmethod
    def of(cls, clean: Tensor, faulty: Tensor, roundoff: float) -> _Pair | None:
        peak, deviation = top(clean, "tensor", BLOCK), float(spread(clean.double()))
        clean, faulty = some_rows(clean, faulty)
        known = clean.isfinite() & faulty.isfinite()
        if not bool(known.any()):
            return None
        c, f = clean.double().where(known, 0.0), faulty.double().where(known, 0.0)
        size = rms(c) or rms(f) or 1.0
        return cls(clean, peak, deviation, c / size, f / size, size, roundoff)

    @property
    def d(self) -> Tensor:
        return self.f - self.c

    def floor(self, mean: Tensor) -> Tensor:
        """φ²."""
        return self.roundoff**2 * (self.c.square() + mean.square()) / 3 + (2 * ACCUMULATION) ** 2

    def wrong_lanes(self) -> Tensor | None:
        """Channels whose error is beyond rounding, when they are some of them only."""
        if self.c.dim() == 0:
            return None
        ratio = (self.d.square() / self.floor(self.c)).reshape(-1, self.c.shape[-1]).mean(0).sqrt()
        wrong = ratio > LOUD
        share = float(wrong.double().mean())
        return wrong if 0 < share < DENSE else None

    def score(self, guess: _Guess) -> _Score:
        """The likelihood at its best scale."""
        error, floor = (self.f - guess.mean).square(), self.floor(guess.mean)
        h = torch.zeros(()) if guess.shape is None else guess.shape.square()
        variance = _scale(error, floor, h) if guess.shape is not None else 0.0
        v = variance * h + floor
        likelihood = -0.5 * float((torch.log(2 * math.pi * v) + error / v).sum())
        return _Score(likelihood, math.sqrt(variance), v.sqrt())

    def fit(self, guess: _Guess, null: _Score) -> Fit:
        score = self.score(guess)
        magnitude, params = guess.magnitude, dict(guess.params)
        if magnitude is None:
            magnitude = score.scale * (self.size if guess.kind == "absolute_gaussian" else 1.0)
        naming = 0.0
        if guess.lanes is not None:
            params["sparsity"] = float(f"{float(guess.lanes.double().mean()):.6g}")
            naming = _log_choose(guess.lanes.numel(), int(guess.lanes.sum()))
        bic = guess.parameters * math.log(self.c.numel()) + 2 * naming - 2 * score.log_likelihood
        z = (self.f - guess.mean) / score.deviation * torch.where(self.c < 0, -1.0, 1.0)
        left = z if guess.lanes is None else z[..., guess.lanes]
        gain = score.log_likelihood - null.log_likelihood
        return Fit(guess.kind, magnitude, params, self.c.numel(), gain, bic, self._explained(guess.mean), distance(left))

    def _explained(self, mean: Tensor) -> float:
        before = float(self.d.square().sum())
        return 1 - float((self.f - mean).square().sum()) / before if before else 0.0


def some_rows(clean: Tensor, faulty: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at equal distances when there are too many values; all of them when the error is in none of those rows."""
    if clean.numel() <= LIMIT or clean.dim() < 2:
        return clean, faulty
    a, b = clean.reshape(-1, clean.shape[-1]), faulty.reshape(-1, faulty.shape[-1])
    rows = torch.linspace(0, len(a) - 1, min(len(a), -(-LIMIT // a.shape[-1]))).long()
    return (a[rows], b[rows]) if bool((a[rows] != b[rows]).any()) else (clean, faulty)


def _scale(error: Tensor, floor: Tensor, h: Tensor) -> float:
    """The s² of greatest likelihood, by Fisher scoring: s² ← Σ w²h²(e² − φ²) / Σ w²h⁴ with w = 1/v."""
    h = h.expand_as(error)
    variance = float(error.sum() / h.sum().clamp_min(1e-300))
    for _ in range(STEPS):
        w = h / (variance * h + floor)
        below = float(w.square().sum())
        if below == 0:
            return 0.0
        variance = max(0.0, float((w.square() * (error - floor) / h.clamp_min(1e-300)).sum()) / below)
    return variance


def distance(z: Tensor) -> float:
    """Kolmogorov–Smirnov distance between a sample and the standard normal."""
    ordered = z.double().flatten().sort().values
    n = ordered.numel()
    below = torch.special.ndtr(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps[1:] - below).max(), (below - steps[:-1]).max()))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


# ---- candidates


def _guesses(pair: _Pair, lanes: Tensor | None) -> Iterator[_Guess]:
    """Every candidate, on all channels or on some."""
    inside = torch.ones_like(pair.c, dtype=torch.bool) if lanes is None else lanes.expand_as(pair.c)
    one = inside.double()
    yield _Guess("relative_gaussian", pair.c, pair.c.abs() * one, 1, lanes=lanes)
    yield _Guess("absolute_gaussian", pair.c, one, 1, lanes=lanes)
    unit = pair.spread / pair.size
    for kind, direction in (("gain", pair.c), ("systematic_bias", pair.c.sign()), ("bias", torch.full_like(pair.c, unit))):
        along = direction * one
        share = float((pair.d * along).sum() / along.square().sum().clamp_min(1e-300))
        magnitude = share * (pair.size if kind == "systematic_bias" else 1.0)
        yield _Guess(kind, pair.c + share * along, one, 2, magnitude, lanes=lanes)
    for kind in ("dead_zone", "saturation"):
        yield from _thresholds(pair, kind, inside, one, lanes)


def _thresholds(pair: _Pair, kind: str, inside: Tensor, one: Tensor, lanes: Tensor | None) -> Iterator[_Guess]:
    """A threshold of each scope, where the error looks like one at all."""
    changed = inside & (pair.d != 0)
    looks = (pair.f == 0) if kind == "dead_zone" else (pair.f.abs() < pair.c.abs())
    if not bool(changed.any()) or float(looks[changed].double().mean()) < 0.5:
        return
    for scope in SCOPES:
        highest = pair.peak if scope == "tensor" else top(pair.raw, scope, BLOCK)
        ceiling = (highest.double() / pair.size).expand_as(pair.c)
        part = (pair.c.abs() / ceiling.clamp_min(1e-300)).where(ceiling > 0, 0.0)
        c, f = pair.c[inside], pair.f[inside]
        t = dead_zone(part[inside], c, f) if kind == "dead_zone" else saturation(part[inside], ceiling[inside], c, f)
        hit = inside & ((part < t) if kind == "dead_zone" else (part > t))
        value = torch.zeros_like(pair.c) if kind == "dead_zone" else t * ceiling * pair.c.sign()
        params = {} if scope == "tensor" else {"scope": scope}
        yield _Guess(kind, pair.c.where(~hit, value), one, 2, t, params, lanes)

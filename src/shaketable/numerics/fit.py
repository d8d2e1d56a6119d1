"""Which noise turned one tensor into another: relative to each value or of one size, by likelihood, and how well it fits.

The faulty value is Gaussian around the clean value c, with the variance

    v = s²·h² + φ²,    φ² = 2u²·c²/3 + (2·ua·rms(c))²

where u is the unit roundoff of the dtype and ua = 2^-24 that of sums inside of a kernel: φ is what two correct devices may
differ by. h is |c| for `relative_gaussian` and 1 for `absolute_gaussian`; for `rounding` s is 0. The smallest BIC wins.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shaketable.faults import FaultBase, make_fault
from shaketable.faults.noise import rms
from shaketable.numerics.intervals import ACCUMULATION, UNIT

ROUNDING = "rounding"
NOISE = ("relative_gaussian", "absolute_gaussian")
LIMIT = 2**17
"""Values that are looked at; more cost time and tell nothing new."""
STEPS = 12
"""Steps of Fisher scoring; it converges in about five."""


@dataclass(frozen=True)
class Fit:
    """One error model of one site, and how well it fits."""

    kind: str
    """A fault of the plan language, or `rounding`: nothing beyond what the dtype does."""
    magnitude: float
    """As the fault takes it."""
    values: int
    log_gain: float
    """Log-likelihood over that of rounding, in nats."""
    ks: float
    """Kolmogorov–Smirnov distance from the normal of the standardised errors, signed as the clean values are: an error
    that always points away from zero, or toward it, is not noise."""

    @property
    def bic(self) -> float:
        """Bayesian information criterion, up to what all candidates share."""
        return (math.log(self.values) if self.kind in NOISE else 0.0) - 2 * self.log_gain

    @property
    def fault(self) -> FaultBase | None:
        """The fault to inject; None where there is nothing to inject."""
        if self.kind == ROUNDING or self.magnitude <= 0:
            return None
        return make_fault({"kind": self.kind, "magnitude": float(f"{self.magnitude:.6g}")})

    @property
    def is_good(self) -> bool:
        """Whether the errors really are normal."""
        return self.kind == ROUNDING or self.ks < 0.1

    def goodness(self) -> str:
        """The goodness in words."""
        poor = "" if self.is_good else ", a poor fit"
        return f"KS {self.ks:.3f}, log-likelihood +{self.log_gain:.4g} over rounding, {self.values} values{poor}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        fault = self.fault
        return asdict(self) | {"bic": self.bic, "good": self.is_good, "fault": None if fault is None else fault.text()}


def best_fit(clean: Tensor, faulty: Tensor) -> Fit | None:
    """The most likely of the candidates; None when no pair of values is finite."""
    unit = UNIT[clean.dtype]
    clean, faulty = some_rows(clean.detach().cpu(), faulty.detach().cpu())
    known = clean.isfinite() & faulty.isfinite()
    if not bool(known.any()):
        return None
    c, f = clean[known].double(), faulty[known].double()
    size = rms(c) or rms(f) or 1.0
    c, d = c / size, (f - c) / size
    floor = 2 * unit**2 * c.square() / 3 + (2 * ACCUMULATION) ** 2
    rounding = _log_likelihood(d, floor)
    fits = []
    for kind, h in ((ROUNDING, torch.zeros_like(c)), (NOISE[0], c.abs()), (NOISE[1], torch.ones_like(c))):
        variance = 0.0 if kind == ROUNDING else _variance(d.square(), floor, h.square())
        v = variance * h.square() + floor
        magnitude = math.sqrt(variance) * (size if kind == "absolute_gaussian" else 1.0)
        ks = distance(d / v.sqrt() * torch.where(c < 0, -1.0, 1.0))
        fits.append(Fit(kind, magnitude, c.numel(), _log_likelihood(d, v) - rounding, ks))
    return min(fits, key=lambda fit: fit.bic)


def some_rows(clean: Tensor, faulty: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at equal distances when there are too many values; all of them when the error is in none of those rows."""
    if clean.numel() <= LIMIT or clean.dim() < 2:
        return clean, faulty
    a, b = clean.reshape(-1, clean.shape[-1]), faulty.reshape(-1, faulty.shape[-1])
    rows = torch.linspace(0, len(a) - 1, min(len(a), -(-LIMIT // a.shape[-1]))).long()
    return (a[rows], b[rows]) if bool((a[rows] != b[rows]).any()) else (clean, faulty)


def _log_likelihood(error: Tensor, variance: Tensor) -> float:
    return -0.5 * float((torch.log(2 * math.pi * variance) + error.square() / variance).sum())


def _variance(square: Tensor, floor: Tensor, h: Tensor) -> float:
    """The s² of greatest likelihood, by Fisher scoring: s² ← Σ w²h²(e² − φ²) / Σ w²h⁴ with w = 1/v; `h` is h²."""
    variance = float(square.sum() / h.sum().clamp_min(1e-300))
    for _ in range(STEPS):
        w = h / (variance * h + floor)
        below = float(w.square().sum())
        if below == 0:
            return 0.0
        variance = max(0.0, float((w.square() * (square - floor) / h.clamp_min(1e-300)).sum()) / below)
    return variance


def distance(z: Tensor) -> float:
    """Kolmogorov–Smirnov distance between a sample and the standard normal."""
    ordered = z.double().flatten().sort().values
    n = ordered.numel()
    below = torch.special.ndtr(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps[1:] - below).max(), (below - steps[:-1]).max()))

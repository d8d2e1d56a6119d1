"""How far rounding alone moves log-probabilities: the yardstick of every later stage.

The trainer reads the rollouts again with every arithmetic result rounded at random within half a unit of the engine's dtype
(`Dither`), a few times. The spread of the log-probabilities around the trainer's own is what a correct program in that dtype
may differ by. It is measured token by token, because an unlikely token moves a hundred times as far as a certain one.

A difference between two programs is `explained` by rounding when its mean size, its largest value and its sign all are:

    mean        at most MEAN times what the noise moves
    largest     no token beyond LARGEST of its own scale
    sign        rounding has none: the share of positive differences, with rollouts as blocks, must not leave [0.2, 0.8] for
                certain. Weights that were rounded once lean a little in one direction for every token; the range allows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from shaketable.mismatch.engines.engine import Rollout, Sampling
from shaketable.mismatch.processing import expected
from shaketable.mismatch.trainer import Trainer

DRAWS = 3
"""Readings with random rounding."""
MEAN, LARGEST = 1.5, 10.0
SMALLEST = 2.0**-18
"""Log-probabilities of float32 logits are this uncertain whatever the model does: a few units of a logit of 16."""
ACCUMULATION = 8.0 * 2.0**-24
"""Of a product's size, its error in float32: partial sums are larger than the sum."""
BIASED, SAME_BIASED = (0.2, 0.8), (0.35, 0.65)
CERTAIN = 1e-3
LEAST = 0.05
"""Of a token's scale: a smaller difference between two programs has no sign that counts."""
SAME_PROGRAM = 0.002
"""The same between two passes of one program, whose weights are the same: they do not lean."""
IMPOSSIBLE = 100.0
"""Nats, of a token to which one side gives no probability."""
TENTH = 0.1
FEWEST = 8
"""Differing tokens below which a sign proves nothing."""
PRIOR = 3.0
"""Weight of the mean scale of all tokens against the measured scale of one, in draws."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul", "convolution")
ARITHMETIC = ("add", "sub", "mul", "div", "silu", "gelu", "tanh", "sigmoid", "_softmax", "add_", "mul_", "index_add_")
ATTENTION = "_scaled_dot_product"


class Dither(TorchDispatchMode):
    """Every arithmetic result of a forward is rounded at random, as a program in `dtype` might have rounded it.

    Args:
        dtype: Of the engine's activations.
        seed: Of the random rounding.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = torch.finfo(dtype).eps / 2
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.in_rotary = 0
        self.hooks: list[Any] = []

    def __enter__(self) -> Dither:
        """Begin; angles of a rotation are computed in float32 by every program, whatever its dtype."""
        self.hooks = [
            register_module_forward_pre_hook(lambda module, args: self._pass_rotary(module, 1)),
            register_module_forward_hook(lambda module, args, out: self._pass_rotary(module, -1)),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def _pass_rotary(self, module: nn.Module, step: int) -> None:
        self.in_rotary += step * ("rotary" in type(module).__name__.lower())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or name.startswith(ATTENTION)
        if self.in_rotary or (not is_product and name not in ARITHMETIC):
            return out
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.dim() == 0 or first.shape[-1] == 1:
            return out
        rounded = self._rounded(first, is_product)
        if name.endswith("_"):
            first.copy_(rounded)
            return out
        return (rounded, *out[1:]) if isinstance(out, tuple) else rounded

    def _rounded(self, x: Tensor, is_product: bool) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        usable = wide.isfinite() & (wide.abs() < 1e30)
        noise = (self._uniform(wide) - 0.5) * 2 * self.unit * wide.abs()
        if is_product:
            size = wide.masked_fill(~usable, 0.0).square().mean(-1, keepdim=True).sqrt()
            noise = noise + (self._uniform(wide) - 0.5) * 2 * ACCUMULATION * size
        if x.dtype in (torch.bfloat16, torch.float16):  # values on the grid of the dtype need noise that leaves it
            noise = noise + (self._uniform(wide) - 0.5) * 2 * torch.finfo(x.dtype).eps / 2 * wide.abs()
        return torch.where(usable, wide + noise, wide).to(x.dtype)

    def _uniform(self, like: Tensor) -> Tensor:
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(self.seed)
        return torch.rand(like.shape, generator=self.generators[like.device], device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class Rounding:
    """By how much rounding moves each token, rollout by rollout, as its standard deviation."""

    scale: list[np.ndarray]
    """In the terms in which the engine returned its numbers."""
    raw: list[np.ndarray]
    """In the terms of the model's own logits."""
    mean_abs: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"mean_abs": self.mean_abs, "dtype": self.dtype, "draws": DRAWS}


@dataclass(frozen=True)
class Deviation:
    """A set of differences held against rounding."""

    tokens: int
    mean_abs: float
    largest: float
    mean_ratio: float
    """Mean size over what rounding makes."""
    worst_ratio: float
    """The largest difference in units of its token's own scale."""
    worst: tuple[int, int]
    """Rollout and position of it."""
    positive: tuple[float, float]
    """Share of differences above zero, 99.9 %."""
    biased: bool

    @property
    def too_large(self) -> bool:
        """Whether rounding cannot have made differences of this size."""
        return self.mean_ratio > MEAN or self.worst_ratio > LARGEST

    @property
    def explained(self) -> bool:
        """Whether rounding can have made them."""
        return not self.too_large and not self.biased

    def says(self) -> str:
        """Why rounding does not explain them; empty where it does."""
        rollout, position = self.worst
        if self.mean_ratio > MEAN:
            return f"they differ by {self.mean_abs:.2g} in the mean, {self.mean_ratio:.3g} times what rounding makes"
        if self.worst_ratio > LARGEST:
            where = f"token {position} of rollout {rollout}"
            return f"{where} differs by {self.largest:.2g}, {self.worst_ratio:.3g} times what rounding makes of it"
        if self.biased:
            low, high = self.positive
            side, share = ("above", low) if low > 0.5 else ("below", 1 - high)
            return f"at least {share:.0%} of the differences are {side} zero, and rounding has no sign"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "worst": list(self.worst), "positive": list(self.positive), "explained": self.explained}


def measure(
    trainer: Trainer,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    dtype: torch.dtype,
    raw: Sequence[Sequence[float]],
    meant: Sequence[Sequence[float]],
) -> Rounding:
    """Read the rollouts with random rounding.

    Args:
        trainer: Whose model is read with.
        rollouts: What it reads.
        sampling: In whose terms the engine returned its numbers.
        dtype: Of the engine's activations; the trainer's own where the engine is unknown.
        raw: The trainer's log-probabilities of its own logits.
        meant: And in the terms of the sampling.
    """
    coarser = max((dtype, trainer.dtype), key=lambda d: torch.finfo(d).eps)
    squares: list[list[list[np.ndarray]]] = [[[] for _ in rollouts] for _ in range(2)]
    for draw in range(DRAWS):
        for i, logits in enumerate(trainer.logits(rollouts, Dither(coarser, draw))):
            for place, (terms, own) in enumerate(((Sampling(1), raw), (sampling, meant))):
                with np.errstate(invalid="ignore"):  # impossible in both
                    moved = np.asarray(expected(logits, rollouts[i], terms)) - np.asarray(own[i])
                squares[place][i].append(np.where(np.isfinite(moved), moved, np.nan) ** 2)
    raw_scale, scale = (_scales(part) for part in squares)
    mean = float(np.concatenate(scale).mean() * np.sqrt(2 / np.pi))
    return Rounding(scale, raw_scale, mean, str(coarser).removeprefix("torch."))


def _scales(squares: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Of each token; the mean of all tokens where a token's own draws were too few to know."""
    every = [np.stack(draws) for draws in squares]
    pooled = np.sqrt(np.nanmean(np.concatenate([e.ravel() for e in every]))) if any(e.size for e in every) else 0.0
    pooled = max(0.0 if np.isnan(pooled) else float(pooled), SMALLEST)
    return [np.sqrt((np.nansum(e, 0) + PRIOR * pooled**2) / ((~np.isnan(e)).sum(0) + PRIOR)) for e in every]


def own_spread(ways: Sequence[Sequence[Sequence[float]]], rounding: Rounding) -> list[np.ndarray]:
    """By how much an engine's ways of computing differ, token by token, in the terms of the returned numbers.

    It is at least a tenth of what rounding makes, since a few ways may agree by chance.
    """
    if len(ways) < 2:
        return rounding.scale
    found = [np.stack([np.asarray(way[i]) for way in ways]).var(0, ddof=1) for i in range(len(rounding.raw))]
    least = TENTH * np.sqrt(np.concatenate([s**2 for s in rounding.raw]).mean())
    pooled = max(float(np.concatenate(found).mean()), float(least) ** 2, SMALLEST**2)
    return [np.sqrt((v + pooled) / 2) * s / r for v, s, r in zip(found, rounding.scale, rounding.raw, strict=True)]


def judge(d: Sequence[np.ndarray], scale: Sequence[np.ndarray], least: float = LEAST) -> Deviation:
    """Hold differences against rounding; a difference that is not finite is as large as can be.

    Args:
        d: By rollout.
        scale: What rounding moves each token by.
        least: Share of its scale below which a difference has no sign that counts.
    """
    flat, sizes = np.concatenate(list(d)), np.concatenate(list(scale))
    flat = np.where(np.isfinite(flat), flat, IMPOSSIBLE)
    ratio = np.abs(flat) / sizes
    at = int(ratio.argmax())
    ends = np.cumsum([len(x) for x in d])
    rollout = int(np.searchsorted(ends, at, side="right"))
    position = at - (int(ends[rollout - 1]) if rollout else 0)
    low, high = positive_share(d, scale, least)
    limits = SAME_BIASED if least == SAME_PROGRAM else BIASED
    size = np.abs(flat)
    return Deviation(
        tokens=len(flat),
        mean_abs=float(size.mean()),
        largest=float(size[at]),
        mean_ratio=float(size.mean() / (sizes.mean() * np.sqrt(2 / np.pi))),
        worst_ratio=float(ratio[at]),
        worst=(rollout, position),
        positive=(low, high),
        biased=low > limits[1] or high < limits[0],
    )


def positive_share(d: Sequence[np.ndarray], scale: Sequence[np.ndarray], least: float = LEAST) -> tuple[float, float]:
    """Interval of the share of positive differences, among those that are more than the last digit.

    Tokens of one rollout are not independent: the number of observations is divided by what clustering adds to the variance
    (the design effect of rollouts as blocks), and the interval is Clopper and Pearson's at that number.
    """
    counts = []
    for one, size in zip(d, scale, strict=True):
        kept = one[np.abs(one) > np.maximum(least * size, 4 * SMALLEST)]
        if len(kept):
            counts.append((int((kept > 0).sum()), len(kept)))
    if not counts or sum(n for _, n in counts) < FEWEST:
        return 0.0, 1.0
    positive, n = np.array([k for k, _ in counts], float), np.array([m for _, m in counts], float)
    share = positive.sum() / n.sum()
    expected_variance = share * (1 - share) * n.sum()
    effect = (
        1.0
        if len(n) < 3 or expected_variance == 0
        else max(1.0, float(((positive - share * n) ** 2).sum() / expected_variance))
    )
    seen = n.sum() / effect
    k = share * seen
    low = 0.0 if k <= 0 else float(stats.beta.ppf(CERTAIN / 2, k, seen - k + 1))
    high = 1.0 if k >= seen else float(stats.beta.ppf(1 - CERTAIN / 2, k + 1, seen - k))
    return low, high

"""The yardstick of all stages: how far rounding alone moves log-probabilities.

The trainer reads the rollouts again with every arithmetic result rounded at random within half a unit of the engine's dtype
(`RandomRounding`), a few times. The spread of each token's log-probability around the trainer's own is what a correct program
in that dtype may differ by. It is measured token by token: an unlikely token moves a hundred times as far as a certain one.

Differences between two programs are explained by rounding when their mean size, their largest value and their sign all are:

    mean        at most `MEAN` times the mean of the scales
    largest     no token beyond `LARGEST` of its own scale
    sign        rounding has none: the share of positive differences, with rollouts as blocks, must not leave [0.2, 0.8] for
                certain. Weights that were rounded once lean a little in one direction for every token; the range allows that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.gap import differences
from shaketable.mismatch.logprobs import LogprobReading, expected
from shaketable.mismatch.results import Deviation, RoundingSize
from shaketable.mismatch.trainer import Trainer
from shaketable.numerics.random_rounding import RandomRounding

DRAWS, MORE_DRAWS = 3, 16
"""Readings with random rounding; and where one token lies outside of what so few have shown."""
SMALLEST = 2.0**-18
"""Log-probabilities of float32 logits are this uncertain whatever the model does: a few units of a logit of 16."""
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
FEW = 0.02
"""Share of tokens that rounding may put on the other side of the edge of a nucleus."""
GAUSSIAN = np.sqrt(2 / np.pi)
"""Mean size of a normal variable, in standard deviations."""


class Rounding:
    """The standard deviation of rounding for each token, in the engine's dtype, or in the trainer's where that is coarser."""

    def __init__(
        self, trainer: Trainer, rollouts: Sequence[Rollout], sampling: Sampling, dtype: torch.dtype, reading: LogprobReading
    ) -> None:
        self._trainer, self._rollouts, self._reading = trainer, rollouts, reading
        self._terms = [Sampling(1)] + ([] if sampling.logprobs_mode == "raw" else [sampling])
        self.dtype = max((dtype, trainer.dtype), key=lambda d: torch.finfo(d).eps)
        self.measure(DRAWS)

    def measure(self, draws: int) -> None:
        """Read the rollouts so many times, each time with other random roundings."""
        squares: list[list[list[np.ndarray]]] = [[[] for _ in self._rollouts] for _ in self._terms]
        own = (self._reading.raw, self._reading.meant)
        for draw in range(draws):
            for i, logits in enumerate(self._trainer.logits(self._rollouts, RandomRounding(self.dtype, draw))):
                for place, how in enumerate(self._terms):
                    (moved,) = differences([expected(logits, self._rollouts[i], how)], [own[place][i]])
                    squares[place][i].append(np.where(np.isfinite(moved), moved, np.nan) ** 2)
        scales = [_scales([np.stack(draws) for draws in part]) for part in squares]
        self.raw, self.scale, self.draws = scales[0], scales[-1], draws

    @property
    def size(self) -> RoundingSize:
        """For the report."""
        dtype = str(self.dtype).removeprefix("torch.")
        return RoundingSize(float(np.concatenate(self.scale).mean() * GAUSSIAN), dtype, self.draws)

    def judge(self, d: Sequence[np.ndarray], raw: bool = False, least: float = LEAST) -> Deviation:
        """Compare differences with rounding, measured more often where few draws leave a doubt.

        `raw` ones are of the model's own logits, and not in the terms of the sampling.
        """
        found = judge(d, self.raw if raw else self.scale, least)
        if not found.is_doubtful or self.draws == MORE_DRAWS:
            return found
        self.measure(MORE_DRAWS)
        return judge(d, self.raw if raw else self.scale, least)

    def among(self, ways: Sequence[Sequence[Sequence[float]]]) -> list[np.ndarray]:
        """The spread of an engine's ways of computing as a scale, token by token, in the terms of the sampling.

        It is at least a tenth of what rounding makes, since a few ways may agree by chance.
        """
        if len(ways) > 1:
            found = [np.stack([np.asarray(way[i]) for way in ways]).var(0, ddof=1) for i in range(len(self.raw))]
        else:
            found = [np.zeros_like(s) for s in self.raw]
        least = TENTH * np.sqrt(np.concatenate([s**2 for s in self.raw]).mean())
        pooled = max(float(np.concatenate(found).mean()), float(least) ** 2, SMALLEST**2)
        return [np.sqrt((v + pooled) / 2) * s / r for v, s, r in zip(found, self.scale, self.raw, strict=True)]


def _scales(squares: list[np.ndarray]) -> list[np.ndarray]:
    """The scale of each token, shrunk towards the mean of all tokens."""
    every = np.concatenate([e.ravel() for e in squares])
    pooled = max(float(np.sqrt(np.nanmean(every))) if np.isfinite(every).any() else 0.0, SMALLEST)
    return [np.sqrt((np.nansum(e, 0) + PRIOR * pooled**2) / ((~np.isnan(e)).sum(0) + PRIOR)) for e in squares]


def judge(d: Sequence[np.ndarray], scale: Sequence[np.ndarray], least: float = LEAST) -> Deviation:
    """Compare differences with rounding; a difference that is not finite is as large as can be.

    One below the share `least` of its scale has no sign that counts.
    """
    flat, sizes = np.concatenate(list(d)), np.concatenate(list(scale))
    size = np.where(np.isfinite(flat), np.abs(flat), IMPOSSIBLE)
    ratio = size / sizes
    at = int(ratio.argmax())
    ends = np.cumsum([len(x) for x in d])
    rollout = int(np.searchsorted(ends, at, side="right"))
    low, high = positive_share(d, scale, least)
    limits = SAME_BIASED if least == SAME_PROGRAM else BIASED
    return Deviation(
        tokens=len(flat),
        mean_abs=float(size.mean()),
        largest=float(size[at]),
        mean_ratio=float(size.mean() / (sizes.mean() * GAUSSIAN)),
        worst_ratio=float(ratio[at]),
        worst=(rollout, at - (int(ends[rollout - 1]) if rollout else 0)),
        positive=(low, high),
        biased=low > limits[1] or high < limits[0],
    )


def from_returned(
    rollouts: Sequence[Rollout], own: Sequence[Sequence[float]], edges: Sequence[Sequence[bool]] = ()
) -> list[np.ndarray]:
    """Returned numbers minus others of the same tokens; a few tokens at the edge of a nucleus may be outside of it."""
    d = differences([r.logprobs for r in rollouts], own)
    if 0 < sum(map(sum, edges)) <= max(1, FEW * sum(len(x) for x in d)):
        return [np.where(np.asarray(edge, dtype=bool), 0.0, x) for x, edge in zip(d, edges, strict=True)]
    return d


def positive_share(d: Sequence[np.ndarray], scale: Sequence[np.ndarray], least: float = LEAST) -> tuple[float, float]:
    """Interval of the share of positive differences, among those that are more than the last digit.

    Tokens of one rollout are not independent: the number of observations is divided by what clustering adds to the variance
    (the design effect of rollouts as blocks), and the interval is Clopper and Pearson's at that number.
    """
    from scipy import stats  # checks inside of a training need none of this, and verl's environment has no scipy

    kept = [x[np.abs(x) > np.maximum(least * s, 4 * SMALLEST)] for x, s in zip(d, scale, strict=True)]
    positive, n = (np.array([f(x) for x in kept if len(x)], float) for f in (lambda x: (x > 0).sum(), len))
    if n.sum() < FEWEST:
        return 0.0, 1.0
    share = positive.sum() / n.sum()
    variance = share * (1 - share) * n.sum()
    effect = max(1.0, float(((positive - share * n) ** 2).sum() / variance)) if len(n) > 2 and variance else 1.0
    seen = n.sum() / effect
    k = share * seen
    low = 0.0 if k <= 0 else float(stats.beta.ppf(CERTAIN / 2, k, seen - k + 1))
    high = 1.0 if k >= seen else float(stats.beta.ppf(1 - CERTAIN / 2, k + 1, seen - k))
    return low, high

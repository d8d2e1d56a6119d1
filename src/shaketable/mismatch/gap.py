"""Stage 1: how far two sets of log-probabilities of the same tokens are apart.

With d = log p(engine) − log p(trainer) of tokens that the engine drew, both estimate KL(engine‖trainer):

    k1 = mean d                     unbiased, and noisy: it can be negative
    k3 = mean (exp(−d) − 1 + d)     unbiased too, never negative, with less spread

and exp(−d) is the ratio that policy gradients weigh or clip by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.results import Bucket, Deviation, Distance, Gap, WorstToken

LOW, HIGH = 0.9, 1.1
DRAWS = 1000
WORST = 8
FEWEST = 5
"""Rollouts below which an interval is over tokens."""
BUCKETS = 6
Numbers = Sequence[float] | np.ndarray


def differences(engine: Sequence[Numbers], trainer: Sequence[Numbers]) -> list[np.ndarray]:
    """d of each rollout."""
    with np.errstate(invalid="ignore"):  # impossible on both sides
        return [np.asarray(e, dtype=np.float64) - np.asarray(t, dtype=np.float64) for e, t in zip(engine, trainer, strict=True)]


def distance(d: Sequence[np.ndarray]) -> Distance:
    """All tokens of all rollouts; those that one side calls impossible are in `impossible` and in no mean."""
    every = np.concatenate(list(d)) if len(d) else np.zeros(0)
    flat = every[np.isfinite(every)]
    lost = len(every) - len(flat)
    if not len(flat):
        return Distance(len(every), 0.0, 0.0, 0.0, 0.0, 1.0 if lost else 0.0, lost)
    ratio, size = np.exp(-flat), np.abs(flat)
    outside = float(np.mean((ratio < LOW) | (ratio > HIGH)))
    k1, k3 = float(flat.mean()), float(k3_of(flat).mean())
    return Distance(len(every), float(size.mean()), float(size.max()), k1, k3, outside, lost)


def k3_of(d: np.ndarray) -> np.ndarray:
    """Each token's exp(−d) − 1 + d, without cancellation where d is small."""
    exact: np.ndarray = np.expm1(-d) + d
    return np.where(np.abs(d) < 1e-4, d * d / 2 - d**3 / 6, exact)


def mean_interval(parts: Sequence[np.ndarray], certain: float = 0.975) -> tuple[float, float]:
    """Interval of the mean over all tokens, by a bootstrap over rollouts, or over tokens where there are few rollouts.

    The mean is as likely as `certain` below the upper end, and above the lower one.
    """
    blocks = list(parts) if len(parts) >= FEWEST else np.concatenate(list(parts))[:, None]
    sums, lengths = np.array([b.sum() for b in blocks]), np.array([len(b) for b in blocks])
    drawn = np.random.default_rng(0).integers(0, len(sums), (DRAWS, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / lengths[drawn].sum(1), (1 - certain, certain))
    return float(low), float(high)


def measure_gap(
    rollouts: Sequence[Rollout],
    trainer: Sequence[Sequence[float]],
    judged: Deviation,
    words: Callable[[int], str] | None = None,
) -> Gap:
    """The gap with its worst tokens, and by position; `judged` are the same differences compared with rounding."""
    d = differences([r.logprobs for r in rollouts], trainer)
    longest = max(len(x) for x in d)
    edges = sorted({round(e) for e in np.linspace(0, longest, min(BUCKETS, longest) + 1)})
    buckets = [(a, b, distance([x[a:b] for x in d if len(x) > a])) for a, b in pairwise(edges)]
    possible = [k3_of(x[np.isfinite(x)]) for x in d if np.isfinite(x).any()]
    low, high = mean_interval(possible) if possible else (0.0, 0.0)
    return Gap(
        **vars(distance(d)),
        rollouts=len(rollouts),
        k3_interval=(max(low, 0.0), high),
        interval_over="rollouts" if len(possible) >= FEWEST else "tokens",
        worst=_worst(rollouts, d, words),
        by_position=[Bucket(a, b - 1, found.tokens, found.mean_abs) for a, b, found in buckets],
        judged=judged,
    )


def _worst(rollouts: Sequence[Rollout], d: Sequence[np.ndarray], words: Callable[[int], str] | None) -> list[WorstToken]:
    places = sorted(((r, t) for r, one in enumerate(d) for t in range(len(one))), key=lambda p: -abs(d[p[0]][p[1]]))
    found = []
    for r, t in places[:WORST]:
        token, engine = rollouts[r].completion[t], rollouts[r].logprobs[t]
        trainer = engine - float(d[r][t]) if np.isfinite(d[r][t]) else None
        found.append(WorstToken(r, t, token, None if words is None else words(token), engine, trainer))
    return found

"""Stage 1: how far two sets of log-probabilities of the same tokens are apart.

With d = log p(engine) − log p(trainer) of tokens that the engine drew, both estimate KL(engine‖trainer):

    k1 = mean d                     unbiased, and noisy: it can be negative
    k3 = mean (exp(−d) − 1 + d)     unbiased too, never negative, with less spread

and exp(−d) is the ratio that policy gradients weigh or clip by. Intervals are of a bootstrap over rollouts, because tokens of
one rollout are not independent; with fewer than five rollouts, over tokens, and the field `over` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.results import Bucket, Deviation, Distance, Gap, MismatchInterval, WorstToken

LOW, HIGH = 0.9, 1.1
DRAWS = 1000
WORST = 8
FEWEST = 5
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


def resample(parts: Sequence[np.ndarray], statistics: np.ndarray, draws: int, seed: int = 0) -> np.ndarray:
    """Bootstrap: means per token of `statistics` (rows of sums, one for each part), over draws of the parts."""
    sums = np.column_stack([statistics, [len(p) for p in parts]])
    drawn = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))
    totals = sums[drawn].sum(1)
    found: np.ndarray = totals[:, :-1] / totals[:, -1:]
    return found


def blocks(d: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a bootstrap draws: rollouts, or tokens where there are few rollouts."""
    return list(d) if len(d) >= FEWEST else [np.array([x]) for x in np.concatenate(list(d))]


def interval(d: Sequence[np.ndarray]) -> MismatchInterval:
    """95 % of mean k1 and k3."""
    kept = [finite for x in d if len(finite := x[np.isfinite(x)])]
    if not kept:
        return MismatchInterval("tokens")
    over, parts = "rollouts" if len(kept) >= FEWEST else "tokens", blocks(kept)
    means = resample(parts, np.array([[p.sum(), k3_of(p).sum()] for p in parts]), DRAWS)
    (low1, low3), (high1, high3) = np.quantile(means, (0.025, 0.975), axis=0).tolist()
    return MismatchInterval(over, (low1, high1), (low3, high3))  # type: ignore[arg-type]


def measure_gap(
    rollouts: Sequence[Rollout],
    trainer: Sequence[Sequence[float]],
    judged: Deviation,
    words: Callable[[int], str] | None = None,
) -> Gap:
    """The gap with its worst tokens, by position and by length.

    Args:
        rollouts: With the engine's own log-probabilities.
        trainer: The trainer's.
        judged: The same differences compared with rounding.
        words: Turns a token id into text.
    """
    d = differences([r.logprobs for r in rollouts], trainer)
    lengths = sorted(len(x) for x in d)
    positions = {round(e) for e in np.linspace(0, lengths[-1], min(BUCKETS, lengths[-1]) + 1)}
    quarters = {lengths[round(q * (len(lengths) - 1))] for q in (0, 0.25, 0.5, 0.75)} | {lengths[-1] + 1}
    return Gap(
        **vars(distance(d)),
        rollouts=len(rollouts),
        interval=interval(d),
        worst=_worst(rollouts, d, words),
        by_position=[_bucket(a, b, [x[a:b] for x in d if len(x) > a]) for a, b in pairwise(sorted(positions))],
        by_length=[_bucket(a, b, [x for x in d if a <= len(x) < b]) for a, b in pairwise(sorted(quarters))],
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


def _bucket(first: int, end: int, part: Sequence[np.ndarray]) -> Bucket:
    return Bucket(**vars(distance(part)), first=first, last=end - 1)

"""How far two sets of log-probabilities of the same tokens are apart.

With d = log p(engine) − log p(trainer) of tokens that the engine drew, both estimate KL(engine‖trainer):

    k1 = mean d                     unbiased, and noisy: it can be negative
    k3 = mean (exp(−d) − 1 + d)     unbiased too, never negative, with less spread

and exp(−d) is the ratio that policy gradients weigh or clip by. Intervals are of a bootstrap over rollouts, because tokens of
one rollout are not independent; with fewer than five rollouts, over tokens, and the field `over` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shaketable.mismatch.engines.engine import Rollout

LOW, HIGH = 0.9, 1.1
DRAWS = 1000
WORST = 8
FEWEST = 5
BUCKETS = 6


@dataclass(frozen=True)
class Distance:
    """Of one set of log-probabilities from another."""

    tokens: int
    mean_abs: float
    """Mean |d|: what floors and explanations are compared by, since it is neither squared nor signed."""
    largest: float
    k1: float
    k3: float
    outside: float
    """Share of tokens whose ratio leaves [0.9, 1.1]."""
    impossible: int = 0
    """Tokens to which one side gives no probability at all."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return dict(vars(self))


def differences(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """d of each rollout."""
    return [np.asarray(e, dtype=np.float64) - np.asarray(t, dtype=np.float64) for e, t in zip(engine, trainer, strict=True)]


def distance(d: Sequence[np.ndarray]) -> Distance:
    """All tokens of all rollouts; those that one side calls impossible are in `impossible` and in no mean."""
    every = np.concatenate(list(d)) if len(d) else np.zeros(0)
    flat = every[np.isfinite(every)]
    lost = len(every) - len(flat)
    if not len(flat):
        return Distance(len(every), 0.0, 0.0, 0.0, 0.0, 1.0 if lost else 0.0, lost)
    ratio = np.exp(-flat)
    size = np.abs(flat)
    outside = float(np.mean((ratio < LOW) | (ratio > HIGH)))
    k1, k3 = float(flat.mean()), float(k3_of(flat).mean())
    return Distance(len(every), float(size.mean()), float(size.max()), k1, k3, outside, lost)


def k3_of(d: np.ndarray) -> np.ndarray:
    """Each token's exp(−d) − 1 + d, without cancellation where d is small."""
    exact: np.ndarray = np.expm1(-d) + d
    return np.where(np.abs(d) < 1e-4, d * d / 2 - d**3 / 6, exact)


def interval(d: Sequence[np.ndarray], seed: int = 0) -> dict[str, Any]:
    """95 % of mean k1 and k3."""
    kept = [x[np.isfinite(x)] for x in d]
    kept = [x for x in kept if len(x)]
    if not kept:
        return {"over": "tokens", "k1": [0.0, 0.0], "k3": [0.0, 0.0]}
    parts = kept if len(d) >= FEWEST else [np.array([x]) for x in np.concatenate(kept)]
    sums = np.array([[p.sum(), k3_of(p).sum(), len(p)] for p in parts])
    drawn = np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))
    totals = sums[drawn].sum(1)
    means = totals[:, :2] / totals[:, 2:]
    ends = np.quantile(means, (0.025, 0.975), axis=0)
    over = "rollouts" if len(d) >= FEWEST else "tokens"
    return {"over": over, "k1": ends[:, 0].tolist(), "k3": ends[:, 1].tolist()}


def describe(rollouts: Sequence[Rollout], trainer: Sequence[Sequence[float]], words: Any = None) -> dict[str, Any]:
    """All that is known of the gap.

    Args:
        rollouts: With the engine's own log-probabilities.
        trainer: The trainer's.
        words: Turns a token id into text.
    """
    d = differences([r.logprobs for r in rollouts], trainer)
    facts = distance(d).to_dict() | {"rollouts": len(rollouts), "interval": interval(d)}
    return facts | {"worst": _worst(rollouts, d, words), "by_position": _by_position(d), "by_length": _by_length(d)}


def _worst(rollouts: Sequence[Rollout], d: Sequence[np.ndarray], words: Any) -> list[dict[str, Any]]:
    places = [(r, t) for r, one in enumerate(d) for t in range(len(one))]
    places.sort(key=lambda p: -abs(d[p[0]][p[1]]))
    found = []
    for r, t in places[:WORST]:
        token, engine = rollouts[r].completion[t], rollouts[r].logprobs[t]
        text = None if words is None else words(token)
        trained = engine - float(d[r][t]) if np.isfinite(d[r][t]) else None
        found.append({"rollout": r, "position": t, "token": token, "text": text, "engine": engine, "trainer": trained})
    return found


def _by_position(d: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Ranges of positions in the completion that hold about as many each."""
    longest = max(len(x) for x in d)
    edges = sorted({round(e) for e in np.linspace(0, longest, min(BUCKETS, longest) + 1)})
    rows = []
    for low, high in pairwise(edges):
        part = [x[low:high] for x in d if len(x) > low]
        rows.append({"from": low, "to": high - 1} | _short(part))
    return rows


def _by_length(d: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Completions by how long they are."""
    lengths = sorted(len(x) for x in d)
    edges = sorted({lengths[round(q * (len(lengths) - 1))] for q in (0, 0.25, 0.5, 0.75)} | {lengths[-1] + 1})
    rows = []
    for low, high in pairwise(edges):
        rows.append({"from": low, "to": high - 1} | _short([x for x in d if low <= len(x) < high]))
    return rows


def _short(part: Sequence[np.ndarray]) -> dict[str, Any]:
    found = distance(part)
    return {"tokens": found.tokens, "mean_abs": found.mean_abs, "k3": found.k3, "outside": found.outside}

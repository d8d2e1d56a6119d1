"""The numbers an engine returned, against the logits that the engine itself computes for the same tokens.

It is the first link of the chain: returned log-probabilities ← the engine's logits, in the terms of the declared sampling. The
engine is shown the tokens that it returned and computes their logits as it does when it samples. Only rounding may be left:
sampling and showing are two passes of one program. A file that says something else (another base, another row, an undeclared
penalty, a prompt that was read otherwise) breaks here, whatever the trainer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shaketable.mismatch.engines.engine import DECODE, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.processing import at_the_edge, expected
from shaketable.mismatch.rounding import LARGEST, LEAST, SAME_PROGRAM, Rounding, judge, own_spread
from shaketable.mismatch.semantics import looked_at, semantics
from shaketable.mismatch.trainer import Trainer

NEAR_ZERO = 0.05
"""Nats: differences of float32 logits have few bits below."""
DISTINCT = 4
"""Different numbers that do not lie on a coarse grid by chance."""
FEW = 0.02
"""Share of tokens that rounding may put on the other side of the edge of a nucleus."""


def returned(engine: RolloutEngine, rollouts: Sequence[Rollout], sampling: Sampling, rounding: Rounding) -> dict[str, Any]:
    """Judge what was returned; an engine that cannot show its logits raises `NotToldError`.

    Args:
        engine: Which returned the numbers, or is said to have.
        rollouts: With the numbers.
        sampling: As it was declared.
        rounding: What rounding moves.
    """
    if sampling.logprobs_mode == "raw":
        own = engine.logprobs(rollouts, DECODE if DECODE in engine.variants() else None)
        return held(rollouts, own, rounding.scale, least=SAME_PROGRAM)
    own, edges = [], []
    for logits, rollout in zip(engine.logits(rollouts), rollouts, strict=True):
        own.append(expected(logits, rollout, sampling))
        edges.append(at_the_edge(logits, rollout, sampling, own[-1]))
    return held(rollouts, own, rounding.scale, edges, SAME_PROGRAM)


def against_itself(
    trainer: Trainer,
    engine: RolloutEngine,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    rounding: Rounding,
    ways: Sequence[Sequence[Sequence[float]]],
) -> str:
    """Why the returned numbers may not be the engine's, by the yardstick of what it differs from itself by; empty if they may.

    Rounding of a whole model in bfloat16 hides a temperature of 1.02 and a token that is off by 0.3; an engine that is shown
    its own tokens repeats most numbers, and hides neither.
    """
    narrow = replace(rounding, scale=own_spread(ways, rounding))
    kept = len(looked_at(rollouts))
    logits, own, edges = [], [], []
    for i, (x, rollout) in enumerate(zip(engine.logits(rollouts), rollouts, strict=True)):
        own.append(expected(x, rollout, sampling))
        edges.append(at_the_edge(x, rollout, sampling, own[-1]))
        logits += [x] if i < kept else []
    found = held(rollouts, own, narrow.scale, edges)
    if found["worst_ratio"] > LARGEST:
        rollout, token = found["worst"]
        times = f"{found['largest']:.2g}, {found['worst_ratio']:.3g} times what the engine differs from itself by"
        return f"token {token} of rollout {rollout} is off from the engine's own number by {times}"
    best = semantics(trainer, rollouts, sampling, narrow, logits)["best"]
    return f"they fit the engine's own logits better if {best['says']}" if best is not None and best["wins"] else ""


def rounded_to(rollouts: Sequence[Rollout]) -> str | None:
    """The coarsest grid that all returned numbers lie on, such as `2 decimals` or `bfloat16`; None for float32 and finer."""
    x = np.concatenate([np.asarray(r.logprobs, dtype=np.float64) for r in rollouts])
    x = x[np.abs(x) > NEAR_ZERO]
    if len(np.unique(x)) < DISTINCT:
        return None
    for digits in range(1, 4):
        if np.array_equal(np.round(x, digits), x):
            return f"{digits} decimals" if digits > 1 else "1 decimal"
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        if np.array_equal(torch.from_numpy(x).to(dtype).double().numpy(), x):
            return str(dtype).removeprefix("torch.")
    return None


def held(
    rollouts: Sequence[Rollout],
    own: Sequence[Sequence[float]],
    scale: Sequence[np.ndarray],
    edges: Sequence[Sequence[bool]] | None = None,
    least: float = LEAST,
) -> dict[str, Any]:
    """Returned numbers against others of the same tokens, with the first token that rounding does not explain.

    Args:
        rollouts: With the returned numbers.
        own: The others.
        scale: What rounding moves each token by.
        edges: Tokens at the edge of a nucleus; a few of them may be outside.
        least: Share of its scale below which a difference has no sign that counts.
    """
    d = [np.asarray(r.logprobs) - np.asarray(o) for r, o in zip(rollouts, own, strict=True)]
    at_edge = [np.asarray(e, dtype=bool) for e in edges] if edges is not None else [np.zeros(len(x), dtype=bool) for x in d]
    total, outside = sum(len(x) for x in d), int(sum(e.sum() for e in at_edge))
    if outside <= max(1, FEW * total):
        d = [np.where(edge, 0.0, x) for x, edge in zip(d, at_edge, strict=True)]
    found = judge(d, scale, least)
    facts = found.to_dict() | {"says": found.says(), "outside_the_nucleus": outside, "example": None}
    if not found.explained:
        at, place = found.worst
        facts["example"] = {
            "rollout": at,
            "position": place,
            "token": rollouts[at].completion[place],
            "returned": rollouts[at].logprobs[place],
            "own": float(own[at][place]) if np.isfinite(own[at][place]) else None,
        }
    return facts

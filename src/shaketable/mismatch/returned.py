"""The numbers an engine returned, against the logits that the engine itself computes for the same tokens.

It is the first link of the chain: returned log-probabilities ← the engine's logits, in the terms of the declared sampling. The
engine is shown the tokens that it returned and computes their logits as it does when it samples. Only rounding may be left:
sampling and showing are two passes of one program. A file that says something else (another base, another row, an undeclared
penalty, a prompt that was read otherwise) breaks here, whatever the trainer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shaketable.mismatch.engines.engine import DECODE, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.processing import at_the_edge, expected
from shaketable.mismatch.rounding import LEAST, SAME_PROGRAM, Rounding, judge

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

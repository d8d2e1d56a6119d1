"""Stage 2: the numbers an engine returned, against the logits that the engine itself computes for the same tokens.

It is the first link of the chain: returned log-probabilities ← the engine's logits, in the terms of the declared sampling. The
engine reads the tokens that it returned and computes their logits as it does when it samples. Only rounding may be left:
sampling and reading are two passes of one program. A file with other numbers (another base, another row, an undeclared
penalty, a prompt that was read otherwise) breaks here, whatever the trainer computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shaketable.mismatch.engine import Rollout, RolloutEngine, Sampling
from shaketable.mismatch.logprobs import read
from shaketable.mismatch.results import LARGEST, Deviation
from shaketable.mismatch.rounding import SAME_PROGRAM, Rounding, judge_returned
from shaketable.mismatch.semantics import keep_examined, try_hypotheses
from shaketable.mismatch.trainer import Trainer

NEAR_ZERO = 0.05
"""Nats: differences of float32 logits have few bits below."""
DISTINCT = 4
"""Different numbers that do not lie on a coarse grid by chance."""


def check_returned(
    engine: RolloutEngine,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    rounding: Rounding,
    decoded: Sequence[Sequence[float]] | None,
) -> Deviation:
    """Judge the returned numbers; an engine that cannot give its logits raises `UnavailableError`.

    Args:
        engine: It returned the numbers, or is said to have.
        rollouts: With the numbers.
        sampling: As it was declared.
        rounding: The scale of rounding for each token.
        decoded: The engine's raw log-probabilities decoded token by token; None where it has no such variant.
    """
    if sampling.logprobs_mode == "raw":
        own = decoded if decoded is not None else engine.logprobs(rollouts)
        return judge_returned(rollouts, own, rounding.scale, least=SAME_PROGRAM)
    found = read(engine.logits(rollouts), rollouts, sampling)
    return judge_returned(rollouts, found.meant, rounding.scale, found.edges, SAME_PROGRAM)


def doubt_returned(
    trainer: Trainer,
    engine: RolloutEngine,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    rounding: Rounding,
    ways: Sequence[Sequence[Sequence[float]]],
) -> str:
    """Why the returned numbers may not be the engine's, compared with its own spread; empty if they may.

    Rounding of a whole model in bfloat16 hides a temperature of 1.02 and a token that is off by 0.3; an engine that reads its
    own tokens repeats most numbers, and hides neither.
    """
    narrow = rounding.among(ways)
    kept: list[torch.Tensor] = []
    found = read(keep_examined(engine.logits(rollouts), rollouts, kept), rollouts, sampling)
    judged = judge_returned(rollouts, found.meant, narrow.scale, found.edges)
    if judged.worst_ratio > LARGEST:
        rollout, token = judged.worst
        times = f"{judged.largest:.2g}, {judged.worst_ratio:.3g} times what the engine differs from itself by"
        return f"token {token} of rollout {rollout} is off from the engine's own number by {times}"
    best = try_hypotheses(trainer, rollouts, sampling, narrow, kept).best
    return f"they fit the engine's own logits better if {best.says}" if best is not None and best.wins else ""


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

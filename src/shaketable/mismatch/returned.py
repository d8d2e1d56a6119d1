"""Stage 2: the numbers an engine returned, against the logits that the engine itself computes for the same tokens.

It is the first link of the chain: returned log-probabilities ← the engine's logits, in the terms of the declared sampling. The
engine reads the tokens that it returned and computes their logits as it does when it samples. Only rounding may be left:
sampling and reading are two passes of one program. A file with other numbers (another base, another row, an undeclared
penalty, a prompt that was read otherwise) breaks here, whatever the trainer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import DECODE, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.logprobs import LogprobReading, read
from shaketable.mismatch.results import LARGEST, Deviation, Semantics
from shaketable.mismatch.rounding import SAME_PROGRAM, Rounding, from_returned, judge
from shaketable.mismatch.semantics import examined, keep_examined

NEAR_ZERO = 0.05
"""Nats: differences of float32 logits have few bits below."""
DISTINCT = 4
"""Different numbers that do not lie on a coarse grid by chance."""
NEAR = 3.0
"""Times what an engine differs from itself by: how far returned numbers may be from its logits, in the mean."""
REPEATED = 0.8
"""Share of numbers that an engine repeats bit for bit, from which every single one must be as near."""


@dataclass(frozen=True)
class OwnNumbers:
    """The engine's own log-probabilities of the tokens that it returned."""

    reading: LogprobReading
    logits: list[Tensor]
    """Of the first rollouts, for hypotheses; empty where the engine gives none."""

    def judge(self, rollouts: Sequence[Rollout], rounding: Rounding) -> Deviation:
        """The returned numbers against these; with the worst token's own where rounding does not explain the difference."""
        d = from_returned(rollouts, self.reading.meant, self.reading.edges)
        found = rounding.judge(d, least=SAME_PROGRAM)
        if found.explained:
            return found
        at, place = found.worst
        own = float(self.reading.meant[at][place])
        return replace(found, worst_pair=(rollouts[at].logprobs[place], own if np.isfinite(own) else None))


def own_numbers(engine: RolloutEngine, rollouts: Sequence[Rollout], sampling: Sampling) -> OwnNumbers:
    """Decode along the returned tokens.

    Raises:
        UnavailableError: The engine does not give its logits, and raw numbers of its own batches neither.
    """
    kept: list[Tensor] = []
    if sampling.logprobs_mode != "raw" or engine.together > 1:
        return OwnNumbers(read(keep_examined(engine.logits(rollouts), rollouts, kept), rollouts, sampling), kept)
    raw = engine.logprobs(rollouts, DECODE if DECODE in engine.variants() else None)  # logits would be of one rollout each
    with suppress(UnavailableError):
        kept = list(engine.logits(examined(rollouts)))
    return OwnNumbers(LogprobReading(raw, raw, [[False] * len(x) for x in raw]), kept)


def doubt(own: OwnNumbers, rollouts: Sequence[Rollout], narrow: Sequence[np.ndarray], semantics: Semantics | None) -> str:
    """Why the returned numbers may not be the engine's, compared with its own spread; empty if they may.

    Rounding of a whole model in bfloat16 hides a temperature of 1.02 and a token that is off by 0.3; an engine that reads its
    own tokens repeats most numbers, and hides neither.
    """
    d = from_returned(rollouts, own.reading.meant, own.reading.edges)
    judged, itself = judge(d, narrow), "what the engine differs from itself by"
    if judged.mean_ratio > NEAR:
        return (
            f"they are off from the engine's own by {judged.mean_abs:.2g} in the mean, {judged.mean_ratio:.3g} times {itself}"
        )
    repeats = np.mean(np.concatenate(d) == 0) >= REPEATED
    if judged.worst_ratio > (NEAR if repeats else LARGEST):
        rollout, token = judged.worst
        times = f"{judged.largest:.2g}, {judged.worst_ratio:.3g} times {itself}"
        exactly = ", and it repeats most others exactly" if repeats else ""
        return f"token {token} of rollout {rollout} is off from the engine's own number by {times}{exactly}"
    if semantics is None:
        return "the engine does not give its logits"
    best = semantics.best
    return f"they fit the engine's own logits better if {best.says}" if best is not None and best.wins else ""


def rounded_to(rollouts: Sequence[Rollout]) -> str | None:
    """The coarsest grid that all returned numbers lie on, such as `2 decimals` or `bfloat16`; None for float32 and finer."""
    x = np.concatenate([np.asarray(r.logprobs, dtype=np.float64) for r in rollouts])
    x = x[np.abs(x) > NEAR_ZERO]
    if len(np.unique(x)) < DISTINCT:
        return None
    for digits in range(1, 6):
        if np.array_equal(np.round(x, digits), x):
            return f"{digits} decimals" if digits > 1 else "1 decimal"
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        if np.array_equal(torch.from_numpy(x).to(dtype).double().numpy(), x):
            return str(dtype).removeprefix("torch.")
    return None

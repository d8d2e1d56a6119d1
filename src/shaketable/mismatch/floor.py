"""Each side against itself: how far log-probabilities move when nothing but the way of computing them changes.

Nobody can ask two programs to agree better than one program agrees with itself. The floor is the largest mean |d| over all
ways that a side was asked for; a gap of at most `NEAR` floors is at the floor. Three, because the gap adds both sides'
roundings and further ones that were not tried, and because floors are estimated from the same few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shaketable.mismatch.engines.engine import NotToldError, Rollout, RolloutEngine
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.trainer import Trainer

NEAR = 3.0
SMALLEST = 2.0**-20
"""Differences below this are those of a logarithm of probabilities that was computed in float32: 16 units at a logit of 1."""
Tell = Callable[[str], None]


def floor(
    trainer: Trainer,
    engine: RolloutEngine | None,
    rollouts: Sequence[Rollout],
    base: Sequence[Sequence[float]],
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """The second rung.

    Args:
        trainer: One side.
        engine: The other; None when only its log-probabilities are known.
        rollouts: What both read.
        base: The trainer's log-probabilities as it computes them by default.
        tell: Called with what is being done.
    """
    rows, untold = [], []
    for variant in trainer.variants():
        tell(f"trainer, {variant}")
        rows.append(_row("trainer", variant, base, trainer.logprobs(rollouts, variant)))
    if engine is not None:
        tell("engine reads what it wrote")
        own = engine.logprobs(rollouts)
        for variant in engine.variants():
            tell(f"engine, {variant}")
            try:
                rows.append(_row("engine", variant, own, engine.logprobs(rollouts, variant)))
            except NotToldError as error:
                untold.append(f"{variant}: {error}")
    largest = max(rows, key=lambda r: r["mean_abs"])
    facts: dict[str, Any] = {"mean_abs": largest["mean_abs"], "k3": max(r["k3"] for r in rows), "rows": rows}
    return facts | {"largest": f"{largest['side']}, {largest['variant']}", "not_told": untold}


def _row(side: str, variant: str, one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> dict[str, Any]:
    found = distance(differences(one, two))
    return {"side": side, "variant": variant, "mean_abs": found.mean_abs, "largest": found.largest, "k3": found.k3}


def is_at(mean_abs: float, facts: dict[str, Any]) -> bool:
    """Whether a distance is no more than what a side differs from itself by."""
    return mean_abs <= max(NEAR * float(facts["mean_abs"]), SMALLEST)

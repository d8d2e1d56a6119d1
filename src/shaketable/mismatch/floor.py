"""Each side against itself: how far log-probabilities move when nothing but the way of computing them changes.

Each way of computing is held against rounding (`rounding.py`). One that moves log-probabilities further is no floor for
anything: the side depends on what it must not depend on, which is a defect of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shaketable.mismatch.engines.engine import (
    ALONE,
    CACHED,
    DECODE,
    DECODE_ALONE,
    EAGER,
    NotToldError,
    Rollout,
    RolloutEngine,
)
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.rounding import Rounding, judge
from shaketable.mismatch.trainer import Trainer

DEPENDS = {
    ALONE: "depends on the batch",
    DECODE: "decodes otherwise than it reads",
    DECODE_ALONE: "depends on the batch when it decodes",
    CACHED: "computes otherwise from its prefix cache",
    EAGER: "computes otherwise in its compiled graphs",
    "other micro-batches": "depends on the batch",
    "padded on the left": "depends on padding",
}
Logprobs = Sequence[Sequence[float]]
Tell = Callable[[str], None]


def floor(
    trainer: Trainer,
    engine: RolloutEngine | None,
    rollouts: Sequence[Rollout],
    base: Sequence[Sequence[float]],
    rounding: Rounding | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Every side in every way that it can be asked for; `ways` holds the engine's log-probabilities in each of them.

    Args:
        trainer: One side.
        engine: The other; None when only its log-probabilities are known.
        rollouts: What both read.
        base: The trainer's log-probabilities as it computes them by default.
        rounding: What rounding moves; without it nothing is judged.
        tell: Called with what is being done.
    """
    rows: list[dict[str, Any]] = []
    untold: list[str] = []
    ways: list[Logprobs] = []

    def add(
        side: str, variant: str, one: Sequence[Sequence[float]], ask: Callable[[], Sequence[Sequence[float]]]
    ) -> Sequence[Sequence[float]] | None:
        tell(f"{side}, {variant}")
        try:
            two = ask()
        except NotToldError as error:
            untold.append(f"{side}, {variant}: {error}")
            return None
        d = differences(two, one)
        found = distance(d)
        row = {
            "side": side,
            "variant": variant,
            "mean_abs": found.mean_abs,
            "largest": found.largest,
            "k3": found.k3,
            "wrong": "",
        }
        if rounding is not None and (judged := judge(d, rounding.raw)).too_large:
            how = DEPENDS.get(variant, f"computes otherwise with {variant}")
            row["wrong"] = f"the {side} {how}: {judged.says()}"
        rows.append(row)
        return two

    for variant in trainer.variants():
        add("trainer", variant, base, functools.partial(trainer.logprobs, rollouts, variant))
    if engine is not None:
        tell("engine reads what it wrote")
        own = engine.logprobs(rollouts)
        ways.append(own)
        decoded: Logprobs = own
        for variant in engine.variants():
            base_of = decoded if variant == DECODE_ALONE else own
            told = add("engine", variant, base_of, functools.partial(engine.logprobs, rollouts, variant))
            ways += [] if told is None else [told]
            decoded = told if variant == DECODE and told is not None else decoded
    largest = max(rows, key=lambda r: r["mean_abs"])
    facts: dict[str, Any] = {"mean_abs": largest["mean_abs"], "k3": max(r["k3"] for r in rows), "rows": rows}
    return facts | {"largest": f"{largest['side']}, {largest['variant']}", "not_told": untold, "ways": ways}

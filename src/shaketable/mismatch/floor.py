"""Stage 3: how far the log-probabilities of each side move when only the way of computing them changes.

Each way is compared with rounding (`rounding.py`). One that moves log-probabilities further is a defect: the side depends on
something that it must not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import ALONE, CACHED, DECODE, EAGER, Rollout, RolloutEngine
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.results import Floor, FloorRow
from shaketable.mismatch.rounding import Rounding
from shaketable.mismatch.trainer import OTHER_BATCHES, Trainer

DEPENDS = {
    ALONE: "depends on the batch",
    DECODE: "gives other log-probabilities when it decodes than when it reads",
    CACHED: "gives other log-probabilities from its prefix cache",
    EAGER: "gives other log-probabilities in its compiled graphs",
    OTHER_BATCHES: "depends on the batch or on padding",
}
Logprobs = Sequence[Sequence[float]]


def measure_floor(
    trainer: Trainer,
    engine: RolloutEngine | None,
    rollouts: Sequence[Rollout],
    base: Logprobs,
    rounding: Rounding | None = None,
    decoded: Logprobs | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Floor, list[Logprobs]]:
    """The floor, and the engine's log-probabilities in each way of computing.

    Args:
        trainer: One side.
        engine: The other; None when only its log-probabilities are known.
        rollouts: The rollouts that both read.
        base: The trainer's log-probabilities as it computes them by default.
        rounding: The scale of rounding; without it no row is judged.
        decoded: The engine's log-probabilities decoded token by token, where they were computed before.
        progress: Called with the current step.
    """
    rows: list[FloorRow] = []
    unavailable: list[str] = []
    ways: list[Logprobs] = []

    def compare(side: Trainer | RolloutEngine, variant: str, one: Logprobs) -> Logprobs | None:
        name = "trainer" if side is trainer else "engine"
        progress(f"{name}, {variant}")
        try:
            two = decoded if side is engine and variant == DECODE and decoded is not None else side.logprobs(rollouts, variant)
        except UnavailableError as error:
            unavailable.append(f"{name}, {variant}: {error}")
            return None
        d = differences(two, one)
        found, wrong, most = distance(d), "", 0
        if any(np.isnan(x).any() for x in [*one, *two]):
            wrong = f"the {name} gives log-probabilities that are not numbers (NaN)"
        elif rounding is not None:
            if (judged := rounding.judge(d, raw=True)).too_large:
                wrong = f"the {name} {DEPENDS.get(variant, f'gives other log-probabilities with {variant}')}: {judged.says}"
            most = int(np.argmax([np.mean(np.abs(x) / s) for x, s in zip(d, rounding.raw, strict=True)]))
        rows.append(FloorRow(name, variant, found.mean_abs, found.largest, found.k3, wrong, most))  # type: ignore[arg-type]
        return two

    for variant in trainer.variants():
        compare(trainer, variant, base)
    if engine is not None:
        progress("engine reads its own completions")
        own = engine.logprobs(rollouts)
        made = [compare(engine, variant, own) for variant in engine.variants()]
        ways = [own, *(one for one in made if one is not None)]
    return Floor(rows, unavailable), ways

"""Stage 3: how far the log-probabilities of each side move when only the way of computing them changes.

Each way is compared with rounding (`rounding.py`). One that moves log-probabilities further is a defect: the side depends on
something that it must not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, RolloutEngine
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.results import Floor, FloorRow
from shaketable.mismatch.rounding import Rounding
from shaketable.mismatch.trainer import Trainer

Logprobs = Sequence[Sequence[float]]


def measure_floor(
    side: Trainer | RolloutEngine,
    rollouts: Sequence[Rollout],
    base: Logprobs | None = None,
    rounding: Rounding | None = None,
    known: Mapping[str, Logprobs] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Floor, list[Logprobs]]:
    """The floor of one side, and its log-probabilities in each way of computing.

    `base` are its log-probabilities as it computes them by default, `known` those of variants that were computed before.
    Without `rounding` no row is judged.
    """
    name: Literal["trainer", "engine"] = "trainer" if isinstance(side, Trainer) else "engine"
    if base is None:
        progress(f"{name} reads the completions")
        base = side.logprobs(rollouts)
    floor, ways = Floor([], []), [base]
    for variant in side.variants():
        progress(f"{name}, {variant}")
        try:
            ways.append(known[variant] if known and variant in known else side.logprobs(rollouts, variant))
        except UnavailableError as error:
            floor.unavailable.append(f"{name}, {variant}: {error}")
            continue
        d = differences(ways[-1], base)
        found, wrong, most = distance(d), "", 0
        if any(np.isnan(x).any() for x in [*base, *ways[-1]]):
            wrong = f"the {name} gives log-probabilities that are not numbers (NaN)"
        elif rounding is not None:
            if (judged := rounding.judge(d, raw=True)).too_large:
                wrong = f"the {name} disagrees with itself ({variant}): {judged.says}"
            most = int(np.argmax([np.mean(np.abs(x) / s) for x, s in zip(d, rounding.raw, strict=True)]))
        floor.rows.append(FloorRow(name, variant, found.mean_abs, found.largest, wrong, most))
    return floor, ways

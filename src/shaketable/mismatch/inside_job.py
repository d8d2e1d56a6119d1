"""What a check of sampler against trainer does in the middle of a training, whichever trainer it is.

Gap and weights are looked at in every check. Floor and share take most of the time: they are measured in the first check, and
again as soon as all checks together have taken less than a hundredth of the training (`Budget`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.mismatch.engines.engine import NotToldError, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.floor import floor
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.processing import expected
from shaketable.mismatch.shares import Shares
from shaketable.mismatch.trainer import Trainer

ROLLOUTS = 4
"""Completions that are read."""
BUDGET = 0.01
"""Of the training's time: while checks have taken more, floor and share are left out."""
PREFIX = "shaketable/mismatch/"
"""Before every name in the trainer's own log."""


class StaleWeightsError(ShaketableError, RuntimeError):
    """The sampler has other weights than the trainer, after a sync."""


class Budget:
    """What all checks of one training took, of the time since it began."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._began = time.perf_counter()

    @property
    def is_left(self) -> bool:
        """Whether floor and share may be measured again."""
        return self.spent <= BUDGET * (time.perf_counter() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What is done inside counts."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - started


def gap(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the two sides' log-probabilities of the same tokens are apart; nothing where there is no token."""
    if not any(len(x) for x in trainer):
        return {}
    found = distance(differences(engine, trainer))
    return {"gap": found.mean_abs, "k3": found.k3, "outside": found.outside}


def floor_and_share(side: Trainer, engine: RolloutEngine | None, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How far each side is from itself, and the family of operators that causes most of the divergence, by name."""
    if not rollouts:
        return {}
    raw = [expected(logits, r, Sampling(1)) for r, logits in zip(rollouts, side.logits(rollouts), strict=True)]
    found = {"floor": float(floor(side, engine, rollouts, raw)["mean_abs"])}
    return found if engine is None else found | _share(side, engine, min(rollouts, key=lambda r: len(r.tokens)))


def _share(side: Trainer, engine: RolloutEngine, rollout: Rollout) -> dict[str, float]:
    meter = Shares(side.model)
    try:
        (told,) = engine.record([rollout], "decode")
        meter.add(rollout, {"prompt": told.prompt or [], "decode": told.calls}, engine.logprobs([rollout], "decode")[0])
    except NotToldError:
        return {}
    found = meter.result()
    if not found["families"]:
        return {}
    first = found["families"][0]
    return {f"share/{first['family']}": float(first["share"])}


def weight_counts(found: Mapping[str, Any]) -> dict[str, float]:
    """For the log: of what `weights.compare` found."""
    counts = {"compared": found["compared"], "cast": found["cast"]}
    counts |= {name: len(found[name]) for name in ("differing", "unknown")}
    return {f"weights_{name}": float(count) for name, count in counts.items()}


def refuse_stale(found: Mapping[str, Any], step: int) -> None:
    """End the training when the sampler has other weights.

    Raises:
        StaleWeightsError: One line that names the first of them.
    """
    if found["differing"]:
        first = found["differing"][0]
        count = f"{len(found['differing'])} of {found['compared']} parameters differ"
        raise StaleWeightsError(f"step {step}: after the sync the sampler's {first['name']} {first['says']}; {count}")


def named(found: Mapping[str, float]) -> dict[str, float]:
    """As the trainer's logger gets it."""
    return {f"{PREFIX}{name}": float(value) for name, value in found.items()}

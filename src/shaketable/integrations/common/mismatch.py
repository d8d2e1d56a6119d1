"""A check of sampler against trainer in the middle of a training, whichever trainer it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shaketable.errors import ShaketableError
from shaketable.mismatch.engine import Rollout, RolloutEngine
from shaketable.mismatch.floor import measure_floor
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.results import ParameterDifference, Weights
from shaketable.mismatch.trainer import Trainer

ROLLOUTS = 4
"""Completions of one check."""
PREFIX = "shaketable/mismatch/"
"""Before every name in the trainer's own log."""


class StaleWeightsError(ShaketableError, RuntimeError):
    """The sampler has other weights than the trainer, after a sync."""


def gap(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> dict[str, float]:
    """The distance between the two sides' log-probabilities of the same tokens; nothing where there is no token."""
    if not any(len(x) for x in trainer):
        return {}
    found = distance(differences(engine, trainer))
    return {"gap": found.mean_abs, "k3": found.k3, "outside": found.outside}


def floor(side: Trainer, engine: RolloutEngine | None, rollouts: Sequence[Rollout]) -> float:
    """The distance of each side from itself, in mean |Δ log p|; that of a log-softmax in float32 is in it."""
    own = side.logprobs(rollouts)
    fast = []
    for logits, rollout in zip(side.logits(rollouts), rollouts, strict=True):
        tokens = torch.tensor(rollout.completion, device=logits.device)[:, None]
        fast.append(logits.float().log_softmax(-1).gather(-1, tokens)[:, 0].tolist())
    found = [distance(differences(own, fast)).mean_abs, measure_floor(side, rollouts, own)[0].largest.mean_abs]
    if engine is not None:
        found.append(measure_floor(engine, rollouts)[0].largest.mean_abs)
    return max(found)


def weight_counts(found: Weights) -> dict[str, float]:
    """The comparison of weights as numbers of a log."""
    counts = {"compared": found.compared, "cast": found.cast, "differing": len(found.differing), "unknown": len(found.unknown)}
    return {f"weights_{name}": float(count) for name, count in counts.items()}


def refuse_stale(found: Weights, step: int) -> None:
    """End the training when the sampler has other weights.

    Raises:
        StaleWeightsError: One line that names the first of them.
    """
    if found.differing:
        first = found.differing[0]
        count = f"{len(found.differing)} of {found.compared} parameters differ"
        raise StaleWeightsError(f"step {step}: after the sync the sampler's {first.name} {first.says}; {count}")


def named(found: Mapping[str, float]) -> dict[str, float]:
    """Numbers under the names of the trainer's own log."""
    return {f"{PREFIX}{name}": float(value) for name, value in found.items()}


def digest(weight: Tensor) -> str:
    """SHA-256 of a weight's bytes; zeros have no sign in it."""
    unsigned = weight.detach().cpu() + 0 if weight.element_size() > 1 else weight.detach().cpu()
    return hashlib.sha256(unsigned.contiguous().view(torch.uint8).numpy().data).hexdigest()


class DigestComparison:
    """A sampler's digests against the weights of a trainer that shares no memory with it.

    Args:
        digests: By name, the dtype in which the sampler holds a weight, and its digest.
        dtype: In which it computes.
        where: Which sampler it is, for the names of what differs.
    """

    def __init__(self, digests: Mapping[str, tuple[str, str]], dtype: torch.dtype, where: str = "") -> None:
        self.digests, self.dtype, self.where = digests, dtype, where
        self.seen: set[str] = set()
        self.cast = 0
        self.differing: list[ParameterDifference] = []

    def add(self, name: str, own: Tensor) -> None:
        """Compare one weight, if the sampler gave its digest."""
        if name not in self.digests:
            return
        kind, digested = self.digests[name]
        held: torch.dtype = getattr(torch, kind)
        self.seen.add(name)
        self.cast += held != own.dtype
        candidates = [own.to(self.dtype).to(held), *([own] if own.dtype == held else [])]
        if all(digest(weight) != digested for weight in candidates):
            self.differing.append(ParameterDifference(f"{name}{self.where}", "other_values", "holds other values"))

    def result(self) -> Weights:
        """The comparison.

        Raises:
            ShaketableError: Nothing was compared, which must not look like weights that are all equal.
        """
        if not self.seen:
            raise ShaketableError("no weight of the sampler has the name of one of the trainer's: nothing was compared")
        dtype = str(self.dtype).removeprefix("torch.")
        return Weights(len(self.seen), self.cast, self.differing, dtype, [], sorted(set(self.digests) - self.seen))

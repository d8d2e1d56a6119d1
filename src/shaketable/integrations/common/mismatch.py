"""A check of sampler against trainer in the middle of a training, whichever trainer it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shaketable.errors import ShaketableError, UnavailableError
from shaketable.mismatch.engine import Rollout, RolloutEngine
from shaketable.mismatch.floor import measure_floor
from shaketable.mismatch.gap import differences, distance
from shaketable.mismatch.results import ParameterDifference, Weights
from shaketable.mismatch.shares import ShareMeter
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


def largest_share(side: Trainer, engine: RolloutEngine, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The family of operators that causes most of the divergence of one completion, by name; nothing where it is not seen."""
    shortest = min(rollouts, key=lambda r: len(r.tokens))
    try:
        meter = ShareMeter(side.model)
        (record,) = engine.record([shortest], "decode")
        returned = engine.logprobs([shortest], "decode")[0]
        meter.add(shortest, {"prompt": record.prompt or [], "decode": record.calls}, returned)
    except UnavailableError:
        return {}
    return {f"share/{row.family}": row.share for row in meter.result().families[:1]}


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
    """SHA-256 of a weight's values, whatever dtype they are held in; zeros have no sign in it."""
    values = weight.detach().cpu().float() + 0
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()


def compare_digests(own: Mapping[str, tuple[str, str]], samplers: Sequence[Mapping[str, str]], dtype: torch.dtype) -> Weights:
    """The weights of samplers against those of a trainer that shares no memory with them.

    Args:
        own: The trainer's digests by name: as a weight is, and cast to the dtype of the samplers.
        samplers: The digests of each.
        dtype: In which they compute.

    Raises:
        ShaketableError: Of one nothing was compared, which must not look like weights that are all equal.
    """
    if any(own.keys().isdisjoint(held) for held in samplers):
        raise ShaketableError("no weight of the sampler has the name of one of the trainer's: nothing was compared")
    both = [(i, name, held[name]) for i, held in enumerate(samplers) for name in own if name in held]
    return Weights(
        compared=len(both),
        cast=sum(got == own[name][1] != own[name][0] for _, name, got in both),
        differing=[
            ParameterDifference(f"{name} (replica {i})", "other_values", "holds other values")
            for i, name, got in both
            if got not in own[name]
        ],
        engine_dtype=str(dtype).removeprefix("torch."),
        missing=[],
        unknown=sorted({name for held in samplers for name in held.keys() - own.keys()}),
    )

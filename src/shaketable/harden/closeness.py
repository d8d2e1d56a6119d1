"""How close a model under a fault is to the clean one, on completions that the clean model wrote: KL and agreement.

Accuracy moves in steps and says nothing of a model that solves no problem. KL(clean‖faulty) and the share of positions whose
most likely token is the same are there for every model and every text, and need no answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shaketable.evaluate.decoding.dynamic import batches
from shaketable.harden.sequences import Pair
from shaketable.harden.students import Students, shaken
from shaketable.inject import Injection


@dataclass(frozen=True)
class Closeness:
    """Per sequence, in the order given."""

    kl: list[float]
    """Mean KL(clean‖faulty) of its tokens, in nats."""
    agreement: list[float]
    """Share of its tokens whose most likely successor is the same."""

    @property
    def mean_kl(self) -> float:
        """Over sequences."""
        return sum(self.kl) / len(self.kl)

    @property
    def mean_agreement(self) -> float:
        """Over sequences."""
        return sum(self.agreement) / len(self.agreement)


@torch.no_grad()
def closeness(students: Students, pairs: Sequence[Pair], injection: Injection | None, batch_size: int) -> Closeness:
    """The student, under a plan or clean, beside the clean model, on (prompt, completion) pairs."""
    whole = [[*p, *c] for p, c in pairs]
    kl, agreement = [0.0] * len(pairs), [0.0] * len(pairs)
    was_training = students.model.training
    students.model.eval()
    try:
        for indices in batches(whole, batch_size):
            chosen = [pairs[i] for i in indices]
            with students.teacher() as clean:
                expected, _ = students.logits(clean, chosen)
            with students.arithmetic(), shaken(injection):
                found, _ = students.logits(students.model, chosen)
            lengths = [len(c) for _, c in chosen]
            for i, k, a in zip(indices, *_by_row(expected, found, lengths), strict=True):
                kl[i], agreement[i] = k, a
    finally:
        students.model.train(was_training)
    return Closeness(kl, agreement)


def _by_row(expected: Tensor, found: Tensor, lengths: list[int]) -> tuple[list[float], list[float]]:
    """Means over the tokens of each row; a few rows at a time are in float32."""
    kl, agreement = [], []
    for t, s in zip(expected.split(lengths), found.split(lengths), strict=True):
        t, s = t.float().log_softmax(-1), s.float().log_softmax(-1)
        p = t.exp()
        kl.append((p * (t - s)).where(p > 0, 0.0).sum(-1).mean())
        agreement.append((t.argmax(-1) == s.argmax(-1)).float().mean())
    return torch.stack(kl).tolist(), torch.stack(agreement).tolist()

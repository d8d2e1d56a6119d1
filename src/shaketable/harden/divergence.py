"""Forward KL from the clean model to the student, a few tokens at a time.

    KL(t‖s) = Σ_v t_v·(log t_v − log s_v)          ∂/∂ logits_s = s − t

Softmaxes of a vocabulary of 150,000 in float32 take 0.6 MB a token, three times over, and autograd would keep them all. So
values and gradient are made together, some tokens at a time, in float32, and what is kept is the gradient, in the logits' own
dtype: no more than the logits themselves. Rejected: a KL over the teacher's k most likely tokens. It is smaller, and it is not
the KL: what the fault moves into the tail is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AT_A_TIME = 1 << 24
"""Logits that are in float32 at any time."""


def forward_kl(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Σ weights·KL(teacher‖student) over tokens.

    Args:
        student: Logits (tokens, vocabulary), differentiable.
        teacher: Logits of the clean model, of the same shape.
        weights: One number for each token.
    """
    found: Tensor = _ForwardKL.apply(student, teacher, weights)  # type: ignore[no-untyped-call]
    return found


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        total = weights.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        rows = max(1, AT_A_TIME // student.shape[-1])
        for at in range(0, len(student), rows):
            s = student[at : at + rows].float().log_softmax(-1)
            t = teacher[at : at + rows].float().log_softmax(-1)
            w = weights[at : at + rows].float()
            p = t.exp()
            total += ((p * (t - s)).where(p > 0, 0.0).sum(-1) * w).sum()
            gradient[at : at + rows] = (s.exp() - p) * w[:, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * g.to(gradient.dtype), None, None

"""Forward KL in chunks is the KL, and its gradient is autograd's."""

import pytest
import torch

from shaketable.harden import distil
from shaketable.harden.distil import forward_kl


def expected(student, teacher, weights):
    t = teacher.float().log_softmax(-1)
    each = torch.nn.functional.kl_div(student.float().log_softmax(-1), t, log_target=True, reduction="none")
    return (each.nan_to_num(0.0).sum(-1) * weights).sum()


def logits(tokens=13, vocabulary=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    s, t = (torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float32).to(dtype) * 3 for _ in range(2))
    return s.requires_grad_(), t, torch.rand(tokens, generator=generator)


@pytest.mark.parametrize("at_a_time", [1, 200, 1 << 24])
def test_value_and_gradient_whatever_the_chunks(monkeypatch, at_a_time):
    monkeypatch.setattr(distil, "AT_A_TIME", at_a_time)
    s, t, w = logits()
    forward_kl(s, t, w).backward()
    found, s.grad = s.grad, None
    loss = expected(s, t, w)
    loss.backward()
    torch.testing.assert_close(found, s.grad)
    torch.testing.assert_close(forward_kl(s, t, w), loss)


def test_a_token_that_the_teacher_forbids_costs_nothing_and_teaches():
    s, t, w = logits()
    t[:, 3] = -torch.inf
    loss = forward_kl(s, t, w)
    loss.backward()
    torch.testing.assert_close(loss, expected(s, t, w))
    assert (s.grad[:, 3] > 0).all(), "its probability is to fall"

"""What torch.utils.checkpoint computes a second time: in the frames of the first, and in nobody else's."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shaketable as st
from tests.tensors import draw

X = draw(2, 4)
NOISE = "relative_gaussian:0.5"


class Tower(nn.Module):
    """Three products of which the second is checkpointed, together with what is told."""

    def __init__(self, reentrant=None, inside=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.reentrant, self.inside = reentrant, inside

    def middle(self, x, scale=1.0):
        if self.inside is not None:
            self.inside()
        return torch.tanh(self.second(x) @ self.second.weight) * scale

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            x = self.middle(x, 2.0)
        elif self.reentrant:
            x = checkpoint(self.middle, x, 2.0, use_reentrant=True)
        else:
            x = checkpoint(self.middle, x, scale=2.0, use_reentrant=False)
        return self.third(x @ self.second.weight)


def gradients(model, plan, **options):
    x = X.clone().requires_grad_()
    with st.inject(model, plan, seed=1, **options) as ledger:
        y = model(x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], ledger


def same(a, b):
    """Up to the order in which the gradients of one weight are added up; noise of another key is far from that."""
    return torch.equal(a[0], b[0]) and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_plans_each_have_their_own_noise_in_what_is_computed_again(reentrant):
    found = []
    for how in (None, reentrant):
        model = Tower(how)
        with st.inject(model, f"{NOISE}@op.matmul", seed=2):
            found.append(gradients(model, f"{NOISE}@module.linear")[0])
    assert same(*found)


def test_a_backward_in_another_thread_recomputes_in_the_frames_of_the_first_thread():
    found = []
    for elsewhere in (False, True):
        model, x = Tower(False), X.clone().requires_grad_()
        with st.inject(model, f"{NOISE}@op.matmul", seed=1) as ledger:
            y = model(x).square().sum()
            if elsewhere:
                thread = threading.Thread(target=y.backward)
                thread.start()
                thread.join()
            else:
                y.backward()
            assert ledger.to_dict()["sites"][0]["recomputed"] == 2
        found.append(x.grad)
    assert torch.equal(*found)

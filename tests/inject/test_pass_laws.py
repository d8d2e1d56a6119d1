"""One outermost call of a model is one pass: recomputation, and backward passes of other calls."""

import threading

import pytest
import torch
from torch import nn

import shaketable as st
from tests.inject.code_paths import Checkpointed
from tests.inject.recomputation import Again

X = torch.ones(2, 4)


class Tied(nn.Module):
    """One layer that is called three times, and may be computed again."""

    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.again = again

    def forward(self, x):
        for _ in range(3):
            x = Again.apply(x, self.layers[0]) if self.again else self.layers[0](x)
        return x


@pytest.mark.parametrize("plan", ["relative_gaussian:0.5@module.linear", "relative_gaussian:0.5@op.matmul,direction=forward"])
def test_a_layer_that_is_called_often_and_computed_again_has_the_noise_of_its_own_call(plan):
    found = []
    for again in (False, True):
        model, x = Tied(again), X.clone().requires_grad_()
        with st.inject(model, plan, seed=1) as ledger:
            model(x).square().sum().backward()
        assert ledger.forward == 3 and ledger.to_dict()["sites"][0]["recomputed"] == (3 if again else 0)
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_pass_has_the_magnitude_of_its_forward_pass():
    model, x = nn.Sequential(nn.Linear(4, 4)), X.clone().requires_grad_()
    injection = st.inject(model, "gain:1@module.linear,direction=both").enable()
    y = model(x)
    injection.set_magnitude(5)
    y.sum().backward()
    assert torch.allclose(x.grad, 4 * model[0].weight.sum(0).expand(2, -1))
    injection.close()


def test_gradients_of_gradients_are_refused_where_a_fault_has_one_of_its_own():
    x = X.clone().requires_grad_()
    model = nn.Sequential(nn.Linear(4, 4))
    with st.inject(model, "relative_gaussian:0.5@module.linear"):
        (first,) = torch.autograd.grad(model(x**3).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        y = self.inner(x)
        return self(y, depth - 1) + self.inner(y) if depth else y


@pytest.mark.parametrize("site", ["module.linear", "op.matmul"])
def test_a_model_that_calls_itself_is_one_pass(site):
    model, x = CallsItself(), torch.ones(2, 4, requires_grad=True)
    with st.inject(model, f"gain:0.5@{site}") as ledger:
        model(x)
        assert ledger.forward == 5
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert ledger.forward == 10, "what is recomputed does not count"


def test_a_backward_in_another_thread_recomputes_in_the_frames_of_the_first_thread():
    found = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed("product"), torch.ones(2, 8, requires_grad=True)
        with st.inject(model, "relative_gaussian:0.5@op.matmul", seed=1) as ledger:
            y = model(x, reentrant=False)
            if elsewhere:
                thread = threading.Thread(target=y.backward)
                thread.start()
                thread.join()
            else:
                y.backward()
            assert ledger.to_dict()["sites"][0]["recomputed"] == 2
        found.append(x.grad)
    assert torch.equal(*found)

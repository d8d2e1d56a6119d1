"""Covered operators under every name, in place, with gradients, and as modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaketable as st
from tests.inject.code_paths import Body

A = torch.linspace(-1, 1, 16).view(4, 4) + 0.05
FORWARD = "gain:1@op.all,direction=forward"
aten = torch.ops.aten


def noisy(function, *given, plan=FORWARD):
    """What a function returns in a model, clean and under a plan, and the ledger."""
    model = Body(function)
    clean = model(*given)
    with st.inject(model, plan, allow_inert=True) as ledger:
        found = model(*given)
    return clean, found, ledger


def spots(ledger):
    return {name: s.fires(False) for name, s in ledger.sites[0].spots.items() if s.counts}


CALLS = {
    "torch.mm": ("matmul", lambda a: torch.mm(a, a)),
    "__rmatmul__": ("matmul", lambda a: a.__rmatmul__(a)),
    "tensordot": ("matmul", lambda a: torch.tensordot(a, a, dims=1)),
    "multi_dot": ("matmul", lambda a: torch.linalg.multi_dot([a, a, a])),
    "bilinear": ("matmul", lambda a: F.bilinear(a, a, torch.ones(2, 4, 4))),
    "aten.bmm": ("matmul", lambda a: aten.bmm(a[None], a[None])),
    "special.softmax": ("softmax", lambda a: torch.special.softmax(a, -1)),
    "_softmax": ("softmax", lambda a: torch._softmax(a, -1, False)),
    "torch.layer_norm": ("layer_norm", lambda a: torch.layer_norm(a, (4,))),
    "torch.rms_norm": ("rms_norm", lambda a: torch.rms_norm(a, (4,))),
    "sdpa": ("sdpa", lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_an_operator_is_met_under_every_name_and_counted_in_its_family(name):
    family, function = CALLS[name]
    clean, found, ledger = noisy(function, A)
    assert torch.allclose(found, 2 * clean, atol=1e-6) and found.dtype == clean.dtype and spots(ledger) == {family: 1}


NOT_COVERED = {
    "log_softmax": lambda a: F.log_softmax(a, -1),
    "overload": lambda a: aten.mm.default(a, a),
    "to": lambda a: a.to(torch.float64),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_no_covered_operator_is_left_as_it_is(name):
    clean, found, ledger = noisy(NOT_COVERED[name], A)
    assert torch.equal(clean, found) and clean.dtype == found.dtype and ledger.forward == 0


IN_PLACE = {
    "addmm_": (lambda a: (a.clone(), a, a)),
    "baddbmm_": (lambda a: (a.clone()[None], a[None], a[None])),
    "addmv_": (lambda a: (a[0].clone(), a, a[1])),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_in_place_leaves_its_faulty_result_where_it_was_told(name):
    kept = []

    def function(a):
        target, *others = IN_PLACE[name](a)
        kept.append(target)
        return getattr(target, name)(*others, beta=2, alpha=3)

    clean, found, ledger = noisy(function, A)
    assert found is kept[1] and torch.allclose(found, 2 * clean, atol=1e-5) and spots(ledger) == {"matmul": 1}


def test_two_clauses_act_one_after_the_other_on_a_result_and_on_a_gradient():
    a = A.clone().requires_grad_()
    model = Body(lambda a: a @ A)
    with st.inject(model, "systematic_bias:1@op.matmul,direction=forward;gain:1@op.matmul") as ledger:
        found = model(a)
        found.sum().backward()
    clean = A @ A
    assert torch.allclose(found, 2 * (clean + clean.sign()), atol=1e-6)
    assert torch.allclose(a.grad, 2 * (torch.ones(4, 4) @ A.T), atol=1e-6)
    assert [(s.forward, s.backward) for s in ledger.sites] == [(1, 0), (1, 1)]


class GELUActivation(nn.Module):
    """Written out in Python, with a product of its own inside."""

    def forward(self, x):
        return F.gelu(x) * torch.mm(x, torch.eye(4)).sign().abs()


def test_a_module_that_is_an_operator_is_met_as_one_and_the_same_operator_inside_is_not():
    model = nn.Sequential(GELUActivation())
    clean = model(A)
    with st.inject(model, "gain:1@op.gelu,direction=forward") as ledger:
        assert torch.allclose(model(A), 2 * clean) and ledger.forward == 1
    with st.inject(model, "gain:1@op.gelu+matmul,direction=forward") as ledger:
        model(A)
    assert spots(ledger) == {"gelu": 1, "matmul": 1}, "another operator inside is met"

"""Functions called in ways that torch allows: none of them is a fault of a healthy device."""

import pytest
import torch
import torch.nn.functional as F

from tests.numerics.replayed_functions import judged

ATTENTION = torch.nn.MultiheadAttention(6, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(axis=1),
        lambda x: x.mean(1, keepdims=True),
        lambda x: torch.softmax(x, axis=0),
        lambda x: torch.matmul(input=x, other=x.T),
        lambda x: torch.masked_fill(input=x, mask=x > 0, value=1.0),
        lambda x: torch.pow(input=x, exponent=2),
        lambda x: x @ x[0],
        lambda x: x[:, 0] @ x,
        lambda x: ATTENTION(x, x, x, need_weights=False)[0],
        lambda x: F.silu(x * 1, inplace=True),
        lambda x: x.masked_fill((x > 0).__iand__(x < 0.5), 0.0),
    ],
)
def test_a_healthy_function_is_judged_and_right(function):
    found = judged(function)
    assert not found.violations and not found.unknown
    assert not any("agreed" in counts for counts in found.coverage.values()), "each function in it has a definition"


def grouped(x, ends):
    weights = torch.linspace(-1, 1, 2 * 16 * 8, dtype=torch.bfloat16).view(2, 16, 8)
    return torch._grouped_mm(x, weights, offs=torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("value", [7.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("row", "is_wrong"), [(1, True), (4, True), (5, False), (7, False)])
def test_rows_behind_the_last_expert_are_nobody_s(row, value, is_wrong):
    x = torch.linspace(-2, 2, 8 * 16, dtype=torch.bfloat16).view(8, 16)

    def tamper(y):
        y = y.clone()
        y[row] = value
        return y

    found = judged(lambda x: grouped(x, [2, 5]), x=x, tamper=tamper)
    assert bool(found.violations) is is_wrong


HIDDEN = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.mark.parametrize("mask", [None, HIDDEN, HIDDEN.double().log().float().expand(3, 5, 5)], ids=["none", "bool", "added"])
@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_attention_has_any_number_of_leading_dimensions(shape, mask):
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x.flip(-1), attn_mask=mask)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = judged(attend, x)
    assert not found.violations and not found.unknown
    assert judged(attend, x, tamper=lambda y: y * 1.001).violations


@pytest.mark.parametrize("function", [F.softplus, torch.expm1])
def test_a_function_without_a_definition_is_given_what_it_was_given_as_it_lay_in_memory(function):
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    found = judged(lambda x: function(x[:, ::2]), x)
    assert not found.violations and not found.unknown

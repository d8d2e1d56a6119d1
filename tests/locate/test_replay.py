"""Every operator is judged from its own inputs: a fault is blamed on the operator that has it, and on no other."""

import math

import pytest
import torch
import torch.nn.functional as F

from shaketable.capture.recorder import channels
from tests.numerics.replayed_functions import judged

# ---- any function


UNDEFINED = {
    "cumsum": lambda x: x.cumsum(-1),
    "softplus": lambda x: F.softplus(x),
    "norm": lambda x: x.norm(dim=-1),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_a_function_without_definition_passes_with_equal_bits_only(name):
    healthy = judged(UNDEFINED[name])
    assert not healthy.violations and not healthy.unknown and len(healthy.coverage) == 1
    other = judged(UNDEFINED[name], tamper=lambda y: y * (1 + 2.0**-20))
    assert not other.violations
    assert other.unknown == {name: f"no host definition of {name}, and host and device differ"}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_dropout_that_is_on_cannot_be_judged(share):
    found = judged(lambda x: F.dropout(x, share, True) + 1)
    assert not found.violations and bool(found.unknown) == bool(share)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.linear(x, x[0]),
    ],
)
def test_what_cannot_be_replayed_is_unknown(function):
    found = judged(function)
    assert not found.violations and len(found.unknown) == 1
    (reason,) = found.unknown.values()
    assert "\n" not in reason and ": " in reason


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1, lambda x: x * x, lambda x: x / 3, lambda x: 2 - x, lambda x: torch.cat([x, x]), lambda x: x.clone(),
        lambda x: x.masked_fill(x > 0, 0.5), lambda x: x.topk(3)[0] * 1, lambda x: x[[0, 2]], lambda x: x.bfloat16(),
        lambda x: (x + 0).mul_(x), lambda x: (x + 0).add_(x), lambda x: torch.add(x, x, out=torch.empty(4, 6)),
        lambda x: (x + 0).masked_fill_(x > 0, 1), lambda x: F.silu(x), lambda x: x @ x.T, lambda x: x.mean(-1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_with_a_definition_are_judged(function, dtype):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    healthy = judged(function, x)
    assert not healthy.violations and not healthy.unknown
    faulty = judged(function, x, tamper=lambda y: y * 1.5)
    assert len(faulty.violations) == 1 and not faulty.unknown


def test_indices_are_judged_where_they_are_the_result():
    found = judged(lambda x: (x > 0).long(), tamper=lambda y: 1 - y)
    assert [(v.function, v.share) for v in found.violations] == [("long", 1.0)]
    assert not judged(lambda x: torch.ones(3, 4).topk(2), tamper=lambda y: (y[0], y[1].flip(-1))).violations, (
        "ties have any order"
    )
    assert judged(lambda x: x.topk(2), tamper=lambda y: (y[0] + 1, y[1])).violations


def test_a_value_that_is_no_number_is_blamed_where_it_appears():
    def poison(y):
        y = y.clone()
        y[1, 2] = math.nan
        return y

    (violation,) = judged(lambda x: x @ x.T, tamper=poison).violations
    assert channels(violation.outside) == [2]
    passed_on = judged(lambda x: F.silu(x * math.nan) @ x.T)
    assert not passed_on.violations

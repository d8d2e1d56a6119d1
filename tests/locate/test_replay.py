"""Every operator is judged from its own inputs: a fault is blamed on the operator that has it, and on no other."""

import pytest
import torch
import torch.nn.functional as F

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


def test_indices_are_judged_where_they_are_the_result():
    found = judged(lambda x: (x > 0).long(), tamper=lambda y: 1 - y)
    assert [(v.function, v.share) for v in found.violations] == [("long", 1.0)]
    assert not judged(lambda x: torch.ones(3, 4).topk(2), tamper=lambda y: (y[0], y[1].flip(-1))).violations, (
        "ties have any order"
    )
    assert judged(lambda x: x.topk(2), tamper=lambda y: (y[0] + 1, y[1])).violations

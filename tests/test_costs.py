"""What a plan costs before anything runs."""

import cProfile

import pytest
from torch import nn

import shaketable as st


class CountedLinear(nn.Linear):
    """A linear that counts how often it is compared with another module."""

    compared = 0

    def __eq__(self, other):
        CountedLinear.compared += 1
        return self is other

    def __hash__(self):
        return id(self)


class Attention(nn.ModuleDict):
    """Known by its name."""


def stack(layers):
    """A model with attention and MLP parts, each of two linears."""

    def pair():
        return {name: CountedLinear(2, 2) for name in ("a_proj", "b_proj")}

    blocks = [nn.ModuleDict({"attention": Attention(pair()), "mlp": nn.ModuleDict(pair())}) for _ in range(layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def calls(layers, plan):
    """Function calls and comparisons that attaching, hooking and closing take."""
    model, profile = stack(layers), cProfile.Profile()
    CountedLinear.compared = 0
    injection = profile.runcall(st.inject, model, plan, allow_inert=True)
    profile.runcall(injection.enable)
    profile.runcall(injection.close)
    return sum(row.callcount for row in profile.getstats()) + CountedLinear.compared


@pytest.mark.parametrize(
    "plan", ["module.linear", "module.linear+mlp,point=input", "module.linear,point=weight", "op.all", "layer.all"]
)
def test_attaching_is_linear_in_the_number_of_layers(plan):
    calls(2, f"gain:0.1@{plan}")
    few, many = (calls(n, f"gain:0.1@{plan}") for n in (40, 160))
    assert many / few < 4.5

"""Operators that are given what a file says, and what they make of it."""

import pytest
import torch
from torch import nn

from shaketable.compare.teacher_forcing import Forcing, laid_out_like


class Twice(nn.Module):
    """A module that calls its only part twice, and another one that nobody forces."""

    def __init__(self):
        super().__init__()
        self.part, self.other = nn.Linear(2, 2, bias=False), nn.ReLU()

    def forward(self, x):
        return self.other(self.part(self.part(x)))


def test_every_call_of_an_operator_gets_its_own_input_and_hands_on_its_own_output():
    model, x = Twice(), torch.ones(1, 2)
    first, second = (torch.full((1, 2), v) for v in (2.0, 3.0)), (torch.full((1, 2), v) for v in (5.0, 7.0))
    ops = {"part": tuple(first), "part#2": tuple(second)}
    forcing = Forcing(model, ops)
    with torch.no_grad(), forcing.active():
        assert torch.equal(model(x), ops["part#2"][1])
    assert torch.equal(forcing.arrived["part"], x) and torch.equal(forcing.arrived["part#2"], ops["part"][1])
    for label, (given, _) in ops.items():
        assert torch.equal(forcing.made[label], given @ model.part.weight.T)
    assert not model.part._forward_hooks and not model.part._forward_pre_hooks


def test_a_call_that_the_file_does_not_have_is_left_alone():
    model, x = Twice(), torch.ones(1, 2)
    forcing = Forcing(model, {"part": (x, torch.full((1, 2), 5.0))})
    with torch.no_grad(), forcing.active():
        found = model(x)
    assert torch.equal(found, (torch.full((1, 2), 5.0) @ model.part.weight.T).relu()) and list(forcing.made) == ["part"]


@pytest.mark.parametrize(
    ("other", "copied"),
    [
        (torch.zeros(2, 3), False), (torch.zeros(3, 2).T, True), (torch.zeros(2, 4), False), (torch.zeros(2, 1).expand(2, 3), False),
        (torch.zeros(4, 3)[::2], True),
    ],
)  # fmt: skip
def test_values_are_laid_out_like_those_that_arrived(other, copied):
    x = torch.arange(6.0).view(2, 3)
    found = laid_out_like(x, other)
    assert torch.equal(found, x) and (found is not x) is copied
    assert not copied or found.stride() == other.stride()

"""Layers as text: a set of numbers, however it is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shaketable.errors import PlanError
from shaketable.layer_ranges import join_layers, parse_layers


@given(some.sets(some.integers(0, 60), min_size=1))
def test_what_is_joined_is_read_back(layers):
    assert parse_layers(join_layers(layers)) == tuple(sorted(layers))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", (3,)),
        ("0+4-6+9", (0, 4, 5, 6, 9)),
        (" 1 - 2 + 4 ", (1, 2, 4)),
        ("4-6+0-5", (0, 1, 2, 3, 4, 5, 6)),
        ("9999", (9999,)),
    ],
)
def test_what_is_read(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "1-2-3", "1++2", "10000", "1.5"])
def test_what_is_no_list_of_layers(text):
    with pytest.raises(PlanError) as refused:
        parse_layers(text)
    assert str(refused.value) == f"layers {text!r} is not a list of indices and ranges such as 0+4-6+29"

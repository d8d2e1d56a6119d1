"""Layers as ranges: a set of numbers, however it is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shaketable.errors import PlanError
from shaketable.layer_ranges import MOST, Layers, join_layers, parse_layers

RUNS = some.lists(some.tuples(some.integers(0, 40), some.integers(1, 6)).map(lambda r: range(r[0], sum(r))), min_size=1)


@given(RUNS)
def test_ranges_that_are_joined_are_the_set_of_what_they_hold(runs):
    wanted = sorted({layer for run in runs for layer in run})
    found = Layers.joined(runs)
    assert list(found) == wanted == list(found.indices()) and len(found) == len(wanted) and found.last == wanted[-1]
    assert all(a.stop < b.start for a, b in zip(found.runs, found.runs[1:], strict=False)), "no two of them touch"
    assert [layer for layer in range(-1, 60) if layer in found] == wanted
    assert found == Layers.of(reversed(wanted)) == parse_layers(str(found)) and join_layers(wanted) == str(found)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", [3]), ("10-12", [10, 11, 12]), ("0+4-6+9", [0, 4, 5, 6, 9]), ("5-5", [5]), (" 1 - 2 + 4 ", [1, 2, 4]),
        ("4-6+0-5", [0, 1, 2, 3, 4, 5, 6]), ("0-9+2-3", list(range(10))), ("999999", [999999]),
    ],
)  # fmt: skip
def test_what_is_read(text, layers):
    assert list(parse_layers(text)) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1-2-3", "1,2", "+", "1++2", "1000000", "1.5"])
def test_what_is_no_list_of_layers(text):
    with pytest.raises(PlanError) as refused:
        parse_layers(text)
    assert str(refused.value) == f"layers {text!r} is not a list of indices and ranges such as 0+4-6+29"


def test_more_layers_than_any_model_has_are_not_listed():
    assert len(Layers((range(MOST),)).indices()) == MOST
    with pytest.raises(PlanError, match=r"^layers 0-10000 are 10,001 layers; 10,000 are more than any model has$"):
        Layers((range(MOST + 1),)).indices()
    assert len(parse_layers("0-999999")) == 1_000_000, "a range takes no room"

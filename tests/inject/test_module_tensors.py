"""The tensor a module is about, inside whatever it takes and returns."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from shaketable.inject.modules import as_multiplied, change_first, change_input, is_product
from shaketable.sites.nested_tensors import map_tensors, tensors_of

X, Y = torch.ones(2), torch.full((2,), 3.0)
IDS = torch.arange(2)
Pair = namedtuple("Pair", "a b")


def doubled(x):
    return 2 * x


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        (X, 2 * X), ((X, Y), (2 * X, Y)), ([None, X, Y], [None, 2 * X, Y]), (Pair(None, X), Pair(None, 2 * X)), (Pair(X, Y), Pair(2 * X, Y)),
        ({"a": 1, "b": X, "c": Y}, {"a": 1, "b": 2 * X, "c": Y}), ((), ()), ((1, [X]), (1, [X])), (None, None), ({}, {}), ("x", "x"),
    ],
)  # fmt: skip
def test_the_first_tensor_of_what_a_module_returns_is_changed_and_nothing_else(value, changed):
    found, there = change_first(value, doubled)
    assert same(found, changed) and there is not same(value, changed)
    assert torch.equal(X, torch.ones(2)), "what was returned is left alone"


def test_a_mapping_is_copied_before_it_is_changed():
    given = {"a": X}
    change_first(given, doubled)
    assert given["a"] is X


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((X, Y), {}, ((2 * X, Y), {}, True)),
        ((IDS, X), {}, ((IDS, 2 * X), {}, True)),
        ((IDS,), {"x": X}, ((IDS,), {"x": 2 * X}, True)),
        ((), {"mask": Y, "hidden_states": X}, ((), {"mask": Y, "hidden_states": 2 * X}, True)),
        ((), {"mask": Y, "input": X}, ((), {"mask": Y, "input": 2 * X}, True)),
        ((), {"mask": Y, "x": X, "input": X}, ((), {"mask": Y, "x": X, "input": 2 * X}, True)),
        ((), {"other": X}, ((), {"other": 2 * X}, True)),
        ((None,), {"ids": IDS}, ((None,), {"ids": 2 * IDS}, True)),
        ((None, 3), {"flag": True}, ((None, 3), {"flag": True}, False)),
    ],
)
def test_the_input_is_the_first_floating_tensor_and_hidden_states_come_before_other_keywords(args, kwargs, found):
    given = dict(kwargs)
    assert same(list(change_input(args, kwargs, doubled)), list(found))
    assert same(given, kwargs)


class Conv1D(nn.Module):
    pass


@pytest.mark.parametrize(("module", "product"), [(nn.Linear(2, 2), True), (Conv1D(), True), (nn.LayerNorm(2), False), (nn.Conv1d(2, 2, 1), False)])  # fmt: skip
def test_linears_are_products(module, product):
    assert is_product(module) is product


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
    ],
)
def test_autocast_casts_what_is_multiplied_where_it_is_on(dtype, inside):
    x = torch.ones(2).to(dtype)
    assert as_multiplied(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert as_multiplied(x).dtype == inside


def test_every_tensor_of_a_nest_is_found_in_order_and_changed():
    nest = {"a": (X, [Y, "text"]), "b": Pair(X + 1, None), "c": 3}
    assert [float(t[0]) for t in tensors_of(nest)] == [1.0, 3.0, 2.0]
    assert same(map_tensors(nest, doubled), {"a": (2 * X, [2 * Y, "text"]), "b": Pair(2 * X + 2, None), "c": 3})
    assert nest["a"][0] is X and list(tensors_of("text")) == []

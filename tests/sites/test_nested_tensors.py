"""Whatever modules take and return, however deep: every tensor is found once, in order, and changed once."""

from collections import OrderedDict, UserDict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as some
from transformers.modeling_outputs import BaseModelOutputWithPast

from shaketable.sites.nested_tensors import map_tensors, tensors_of

Pair = namedtuple("Pair", "first second")
NUMBERS = some.integers(0, 1000)
LEAVES = some.one_of(NUMBERS.map(torch.tensor), NUMBERS, some.none(), some.text(max_size=3))


def nests(inner):
    keys = some.text(max_size=3)
    return some.one_of(
        some.lists(inner, max_size=4),
        some.lists(inner, max_size=4).map(tuple),
        some.tuples(inner, inner).map(lambda both: Pair(*both)),
        some.dictionaries(keys, inner, max_size=3),
        some.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        some.dictionaries(keys, inner, max_size=3).map(UserDict),
    )


NESTS = some.recursive(LEAVES, nests, max_leaves=12)


def written(value):
    """The nest as text, each tensor as its number."""
    if isinstance(value, torch.Tensor):
        return f"<{int(value)}>"
    if isinstance(value, dict | UserDict):
        return f"{type(value).__name__}{[(k, written(v)) for k, v in value.items()]}"
    return f"{type(value).__name__}{[written(v) for v in value]}" if isinstance(value, tuple | list) else repr(value)


@given(NESTS)
def test_every_tensor_is_found_once_and_in_order(nest):
    def walk(value):
        if isinstance(value, torch.Tensor):
            return [value]
        inside = value.values() if isinstance(value, dict | UserDict) else value if isinstance(value, tuple | list) else ()
        return [t for member in inside for t in walk(member)]

    found = list(tensors_of(nest))
    assert [id(t) for t in found] == [id(t) for t in walk(nest)]


@given(NESTS)
def test_a_change_reaches_every_tensor_once_and_leaves_the_rest_and_the_original(nest):
    before = written(nest)
    changed = map_tensors(nest, lambda t: t + 5000)
    assert written(nest) == before, "the original is left alone"
    back = map_tensors(changed, lambda t: t - 5000)
    assert written(back) == before, "kinds, keys and order are kept"
    assert [int(t) for t in tensors_of(changed)] == [int(t) + 5000 for t in tensors_of(nest)]


def test_an_output_of_a_model_is_changed_by_key_and_by_attribute_and_the_original_is_left():
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x, y))
    changed = map_tensors(output, lambda t: t + 10)
    assert type(changed) is BaseModelOutputWithPast and changed.past_key_values is None
    assert changed.last_hidden_state.tolist() == changed["last_hidden_state"].tolist() == [11.0]
    assert [t.tolist() for t in changed.hidden_states] == [[11.0], [12.0]]
    assert output.last_hidden_state is x and output["hidden_states"][1] is y
    assert [t.item() for t in tensors_of(output)] == [1.0, 1.0, 2.0]

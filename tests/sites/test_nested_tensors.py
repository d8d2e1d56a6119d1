"""Whatever modules take and return, however deep: every tensor is found once, in order, and changed once."""

from collections import UserDict, namedtuple

import torch
from hypothesis import strategies as some
from transformers.modeling_outputs import BaseModelOutputWithPast

from shaketable.sites.nested_tensors import map_tensors, tensors_of

Pair = namedtuple("Pair", "first second")
NUMBERS = some.integers(0, 1000)
LEAVES = some.one_of(NUMBERS.map(torch.tensor), NUMBERS, some.none(), some.text(max_size=3))


def written(value):
    """The nest as text, each tensor as its number."""
    if isinstance(value, torch.Tensor):
        return f"<{int(value)}>"
    if isinstance(value, dict | UserDict):
        return f"{type(value).__name__}{[(k, written(v)) for k, v in value.items()]}"
    return f"{type(value).__name__}{[written(v) for v in value]}" if isinstance(value, tuple | list) else repr(value)


def test_an_output_of_a_model_is_changed_by_key_and_by_attribute_and_the_original_is_left():
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x, y))
    changed = map_tensors(output, lambda t: t + 10)
    assert type(changed) is BaseModelOutputWithPast and changed.past_key_values is None
    assert changed.last_hidden_state.tolist() == changed["last_hidden_state"].tolist() == [11.0]
    assert [t.tolist() for t in changed.hidden_states] == [[11.0], [12.0]]
    assert output.last_hidden_state is x and output["hidden_states"][1] is y
    assert [t.item() for t in tensors_of(output)] == [1.0, 1.0, 2.0]

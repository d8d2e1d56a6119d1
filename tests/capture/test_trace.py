"""One forward kept as one call per layer; models whose layers are called otherwise are refused by name."""

import pytest
import torch

from shaketable.capture.reference import Reference
from shaketable.capture.trace import LayerCall, forward, hidden, record_layer, trace, with_hidden
from shaketable.errors import ModelError
from tests.locate.architectures import build, tokens

X, Y = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
IDS = tokens(n=6)


def test_hidden_states_are_what_is_given_first_of_the_shape_of_the_result():
    assert hidden((X, Y), {"hidden_states": Y}, Y) is X and hidden((), {"hidden_states": X, "mask": Y}, Y) is X
    assert hidden((X[:, :1], 3, X > 0, {"x": Y}), {"mask": X}, X) is Y
    assert hidden((IDS, X[0]), {}, X) is IDS, "an embedding is given none"
    assert with_hidden((X, 3), {"mask": Y}, X, Y) == ((Y, 3), {"mask": Y})
    args, kwargs = with_hidden((), {"hidden_states": X, "mask": 5}, X, Y)
    assert args == () and kwargs["hidden_states"] is Y and kwargs["mask"] == 5


def test_a_layer_is_called_again_with_what_it_was_given_in_containers_of_its_own():
    seen = []

    def layer(x, cache=None):
        cache.append(1)
        seen.append((x, len(cache), torch.is_grad_enabled()))
        return (x + 1, "more")

    cache = []
    call = LayerCall(2, "layers.2", layer, (X,), {"cache": cache}, (Y, "more", X))
    assert call.x is X and call.y is Y
    call.again()
    call.again(Y)
    assert [(x is given, n, graded) for (x, n, graded), given in zip(seen, (X, Y), strict=True)] == [(True, 1, False)] * 2
    assert cache == []


def test_every_layer_is_kept_once_with_its_input_and_output():
    model = build("llama")
    found = trace(model, IDS, Reference(model))
    assert [(c.index, c.name) for c in found.calls] == [(n, f"model.layers.{n}") for n in range(3)]
    assert torch.equal(found.logits, forward(model, IDS))
    assert torch.equal(found.calls[0].y, found.calls[1].x) and torch.equal(found.calls[1].y, found.calls[2].x)
    assert {r.path for r in found.outside.records if r.func is None} >= {"model.embed_tokens", "lm_head", "model.layers.0"}
    inside = record_layer(found.calls[1], Reference(model))
    assert torch.equal(inside.output if torch.is_tensor(inside.output) else inside.output[0], found.calls[1].y)
    assert inside.leaf("mlp.down_proj") is not None and inside.leaf("mlp.none") is None


def test_a_layer_that_is_called_twice_or_never_is_named():
    shared, short = build("llama"), build("llama")

    short.model.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match=r"^model\.layers\.2 was not called in a forward$"):
        trace(short, IDS, Reference(short))
    original = shared.model.forward

    def again(*args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    shared.model.forward = again
    with pytest.raises(ModelError) as refused:
        trace(shared, IDS, Reference(shared))
    said = "model.layers.0 is called more than once in a forward; locate follows one call per layer"
    assert str(refused.value) == said

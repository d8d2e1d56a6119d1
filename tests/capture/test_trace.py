"""One forward kept as one call per layer; models whose layers are called otherwise are refused by name."""

import pytest
import torch

from shaketable.capture.reference import Reference
from shaketable.capture.trace import forward, record_layer, trace
from shaketable.errors import ModelError
from tests.locate.architectures import build, tokens

X, Y = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
IDS = tokens(n=6)


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

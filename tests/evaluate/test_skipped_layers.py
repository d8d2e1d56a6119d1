"""Models that do without a layer: h instead of h + f(h), in one pass and with a cache, and without the faults in it."""

import pytest
import torch

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.dynamic import Decoder
from shaketable.evaluate.skipped_layers import skip_layers, without
from shaketable.models import load_model, load_skeleton
from shaketable.plan import Plan
from tests.study.small_studies import FAULTY


def test_a_skipped_layer_hands_on_what_it_is_given():
    model, tokenizer = load_model("nano")
    ids = torch.tensor([tokenizer("512+134=")["input_ids"]])
    skip_layers(model, [3])
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True).hidden_states
        found = Decoder.of(model, tokenizer, 4).decode(model, ids.tolist())[0].tokens
        assert torch.equal(seen[3], seen[4]) and not torch.equal(seen[4], seen[5])
        for token in found:  # without a cache
            assert int(model(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        (FAULTY, None),
        ("gain:0.1@layer.2-4", "gain:0.1@layer.2+4"),
        ("gain:0.1@module.linear", "gain:0.1@module.linear"),
        ("gain:0.1@module.linear,layers=3", None),
        ("gain:0.1@op.matmul,layers=3", None),
        (f"{FAULTY};gain:0.1@op.matmul", "gain:0.1@op.matmul"),
    ],
)
def test_faults_of_a_layer_that_is_not_run_are_not_there(plan, left):
    found = without(Plan.parse(plan), [3], load_skeleton("nano"))
    assert (found and found.text()) == left


@pytest.mark.parametrize(("layers", "words"), [([8], "has layers 0-7"), ([0], "layer 0 cannot be skipped")])
def test_what_cannot_be_skipped_is_refused(layers, words):
    with pytest.raises(ShaketableError, match=words):
        skip_layers(load_model("nano")[0], layers)

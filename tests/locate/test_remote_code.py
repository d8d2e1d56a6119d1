"""Models as people write them, in code that ships with a checkpoint: healthy ones are never called faulty, faults are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.sites.structure import find_layers
from tests.locate.remote_code import MODELS, VOCABULARY, build

pytestmark = pytest.mark.attack("models of one's own")
IDS = torch.randint(1, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))
EVERY = pytest.mark.parametrize("name", MODELS)


def assert_not_faulty(found):
    assert found.verdict == "HEALTHY" and not found.evidence, found.sentence


@EVERY
def test_a_healthy_model_is_healthy(name):
    assert_not_faulty(st.locate(build(name), mode="host", input_ids=IDS))


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize(
    ("mode", "dtype"), [("host", torch.bfloat16), ("all", torch.float32), ("all", torch.bfloat16)], ids=str
)
def test_a_healthy_model_is_healthy_in_every_mode_and_dtype(name, mode, dtype):
    assert_not_faulty(st.locate(build(name, dtype), mode=mode, input_ids=IDS))


def test_a_model_that_has_been_used_is_not_called_faulty():
    """Caches are as long as the longest text so far, and numbers follow them."""
    model = build("Baichuan")
    with torch.no_grad():
        model(input_ids=IDS.repeat(1, 2))
    found = st.locate(model, mode="host", input_ids=IDS)
    assert found.verdict != "FAULT" and not found.evidence, found.sentence
    assert found.verdict == "HEALTHY" or "may be trained, a cache" in found.sentence


# ---- faults from outside of the plan language


def last_linear(model):
    """A linear of the second layer from the end."""
    layers = find_layers(model)[0]
    return [module for module in layers[-2].modules() if isinstance(module, nn.Linear)]


@EVERY
def test_a_channel_that_is_wrong_is_found_in_its_linear(name):
    model = build(name)
    linears = last_linear(model)
    if not linears:
        pytest.skip("its products are functions")
    own = linears[-1].forward

    def wrong(x):
        y = own(x).clone()
        y[..., 1] *= 1.01
        return y

    linears[-1].forward = wrong
    found = st.locate(model, mode="host", input_ids=IDS)
    named = {n for n, m in model.named_modules() if m is linears[-1]}
    if type(linears[-1]) is nn.Linear:
        layer = find_layers(model)[1][found.layer]
        assert found.verdict == "FAULT" and f"{layer}.{found.op}" in named and found.lanes == [1], found.sentence
    else:
        assert any("a forward of its own" in code for code in found.foreign), found.sentence

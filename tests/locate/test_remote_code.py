"""A model as people write it, in code that ships with a checkpoint: healthy it is never called faulty, a fault is found."""

from __future__ import annotations

import pytest
import torch

import shaketable as st
from tests.locate.remote_code import VOCABULARY, build

pytestmark = pytest.mark.attack("models of one's own")
IDS = torch.randint(1, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["host", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_model_is_healthy(mode, dtype):
    found = st.locate(build(dtype), mode=mode, input_ids=IDS)
    assert found.verdict == "HEALTHY" and not found.evidence, found.sentence


def test_a_model_that_has_been_used_is_not_called_faulty():
    """Caches are as long as the longest text so far, and numbers follow them."""
    model = build()
    with torch.no_grad():
        model(input_ids=IDS.repeat(1, 2))
    found = st.locate(model, mode="host", input_ids=IDS)
    assert found.verdict != "FAULT" and not found.evidence, found.sentence
    assert found.verdict == "HEALTHY" or "may be trained, a cache" in found.sentence


def test_a_channel_that_is_wrong_is_found_in_its_linear():
    model = build()
    linear = model.layers[1].mlp.w2
    own = linear.forward

    def wrong(x):
        y = own(x).clone()
        y[..., 1] *= 1.01
        return y

    linear.forward = wrong
    found = st.locate(model, mode="host", input_ids=IDS)
    assert (found.verdict, found.layer, found.op, found.lanes) == ("FAULT", 1, "mlp.w2", [1]), found.sentence

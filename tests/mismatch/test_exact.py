"""`mismatch --exact`: which operators give the same bits, the first that does not, and why, where the host can show it."""

import pytest
import torch

from shaketable.mismatch.exact import compare_bits
from shaketable.mismatch.hf import HFEngine
from shaketable.models import load_model
from tests.mismatch import pairs


def found(trainer, engine, plant=lambda model: None):
    model, _ = load_model("nano", dtype=engine)
    plant(model)
    other = HFEngine(model)
    rollouts = other.sample(pairs.prompts(3), pairs.sampling(max_new_tokens=6))
    return compare_bits(pairs.trainer(trainer), other, rollouts, 2)


def split_product(model):
    """A product that sums eight parts apart, as kernels that split the contraction do."""
    module = model.model.layers[3].mlp.down_proj

    def forward(x):
        parts = zip(x.chunk(8, -1), module.weight.chunk(8, 1), strict=True)
        return sum(a @ b.mT for a, b in parts)

    module.forward = forward


def off_by_one(model):
    model.model.layers[2].self_attn.k_proj.register_forward_hook(lambda m, a, y: torch.nextafter(y, y + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_program_has_the_same_bits(dtype):
    kinds = found(dtype, dtype).kinds
    assert {k.kind for k in kinds} >= {"embedding", "rms_norm", "linear", "rotary", "attention", "lm_head", "log_softmax"}
    assert {k.share for k in kinds if k.phase == "prefill"} == {1.0}
    # Decoding computes one row at a time, the trainer all of them: kernels may differ, and nothing else may.
    assert all("one row at a time" in why for k in kinds for why in k.why)


def test_the_order_of_a_sum_is_named():
    facts = found(torch.float32, torch.float32, split_product)
    assert facts.first.name == "model.layers.3.mlp.down_proj"
    assert facts.first.why == "accumulation order: summed in float32, in 8 parts and rounded once"


def test_another_dtype_is_named():
    first = found(torch.float32, torch.bfloat16).first
    assert (first.name, first.why) == ("model.embed_tokens", "another dtype: bfloat16 instead of float32")


def test_what_no_variant_shows_is_unknown():
    first = found(torch.float32, torch.float32, off_by_one).first
    assert (first.name, first.why) == ("model.layers.2.self_attn.k_proj", "unknown: differs by at most 1 ulp")

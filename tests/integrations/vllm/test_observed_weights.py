"""Weights of an engine under the trainer's names, and an order of experts that is undone."""

import pytest
import torch
from torch import nn

from shaketable.errors import ShaketableError
from shaketable.integrations.vllm.observe import parts, undone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_permutation_of_every_expert_is_undone(dtype):
    weight = torch.randn(3, 48, 40).to(dtype)
    order = torch.randperm(48 * 40, generator=torch.Generator().manual_seed(0))

    def pack(x):
        return x.reshape(len(x), -1)[:, order].view(x.shape)

    assert torch.equal(undone(pack(weight), pack), weight)


def test_packing_that_changes_numbers_is_refused():
    with pytest.raises(ShaketableError, match="cannot be undone"):
        undone(torch.randn(2, 8, 8), lambda x: x.flip(-1) * 0.5)


def test_a_fused_parameter_is_told_as_its_projections():
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    fused = nn.Linear(4, 8)
    fused.output_sizes = [4, 2, 2]
    told = dict(parts("layers.0.qkv_proj", fused, "weight", model, fused.weight))
    assert list(told) == [f"layers.0.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(torch.cat(list(told.values())), fused.weight)
    padded = nn.Embedding(16, 4)
    padded.org_vocab_size = 10
    ((name, value),) = parts("embed_tokens", padded, "weight", model, padded.weight)
    assert name == "embed_tokens.weight" and torch.equal(value, padded.weight[:10])

"""What each role of a model costs."""

import pytest
import torch
import transformers

from shaketable.cli import flops
from shaketable.sites.structure import Anatomy


def small_llama(**more):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes | {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False} | more)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_every_role_costs_what_its_shapes_say():
    tokens, head = 8, 8
    table = flops.costs(Anatomy.of(small_llama(head_dim=head)), tokens)
    wide, narrow = 6 * head, 2 * head
    linears = 3 * (24 * wide + 2 * 24 * narrow + wide * 24 + 3 * 24 * 40)
    assert table["linear"] == flops.RoleCost(3 * 7, linears, 2.0 * linears)
    assert table["rmsnorm"] == flops.RoleCost(3 * 2 + 1, 7 * 24, 4.0 * 7 * 24)
    assert table["lm_head"] == flops.RoleCost(1, 50 * 24, 2.0 * 50 * 24)
    assert table["embedding"] == flops.RoleCost(1, 50 * 24, 0.0)
    assert table["attention core"] == flops.RoleCost(3, 0, 3 * 4.0 * (tokens / 2) * 6 * head)
    assert "other" not in table


def test_a_token_visits_some_experts_and_every_other_weight():
    config = transformers.MixtralConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=4,
        vocab_size=50, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        anatomy = Anatomy.of(transformers.MixtralForCausalLM(config))
    experts = [p for p in anatomy.parts if "experts" in p.name.split(".") and p.weights]
    others = [p for p in anatomy.parts if p.role == "linear" and "experts" not in p.name.split(".")]
    assert experts and others
    for parts, share in ((experts, 2 / 8), (others, 1.0)):
        for part in parts:
            size = sum(part.module._parameters[name].numel() for name in part.weights)
            assert flops.part_flops(part, anatomy) == pytest.approx(2.0 * size * share)

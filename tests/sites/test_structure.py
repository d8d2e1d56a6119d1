"""Roles, layers and mixtures of experts, for the model families that people bring."""

import pytest
import torch
import transformers
from torch import nn

import shaketable as st
from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy, find_layers
from tests.sites.role_counts import role_counts

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
FAMILIES = {
    "Llama": (SMALL, {"linear": 21, "rmsnorm": 7, "attention": 3, "mlp": 3, "embedding": 1, "lm_head": 1}),
    "Qwen3": (SMALL | {"num_key_value_heads": 2, "head_dim": 8}, {"linear": 21, "rmsnorm": 13}),
    "GPT2": ({"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64}, {"linear": 12, "layernorm": 7, "lm_head": 1}),
    "OPT": ({"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64, "word_embed_proj_dim": 32}, {"linear": 18, "lm_head": 1}),
    "Mixtral": (SMALL | {"num_key_value_heads": 2, "num_local_experts": 4}, {"linear": 15, "router": 3, "rmsnorm": 7}),
    "Qwen2Moe": (SMALL | MOE | {"shared_expert_intermediate_size": 32}, {"linear": 24, "router": 6, "rmsnorm": 7}),
}  # fmt: skip


def skeleton(family):
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family][0])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_and_layers(family):
    anatomy = Anatomy.of(skeleton(family))
    assert len(anatomy.layers) == 3
    counts = role_counts(anatomy)
    assert {k: counts.get(k, 0) for k in FAMILIES[family][1]} == FAMILIES[family][1]
    assert anatomy.is_moe == (family in ("Mixtral", "Qwen2Moe"))


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def stacks(*paths, kind=None):
    """A model with a stack of two layers at each path; the last of another class if one is given."""
    root = nn.Module()
    for path in paths:
        here = root
        *names, last = path.split(".")
        for name in names:
            setattr(here, name, getattr(here, name, nn.Module()))
            here = getattr(here, name)
        made = kind if kind and path == paths[-1] else block
        setattr(here, last, nn.ModuleList([made(), made()]))
    return root


@pytest.mark.parametrize("path", ["model.layers", "transformer.h", "blocks", "language_model.model.layers", "decoder.block"])
def test_layers_are_found_wherever_people_put_them(path):
    assert len(find_layers(stacks(path))[0]) == 2


@pytest.mark.parametrize(
    "other",
    [
        stacks("policy.model.layers", "judge.model.layers"), stacks("decoder.layers", "encoder.layers"),
        stacks("model.low.layers", "model.high.layers", kind=lambda: nn.TransformerEncoderLayer(2, 1, 2)),
    ],
)  # fmt: skip
def test_stacks_of_two_models_or_of_two_kinds_are_not_put_together(other):
    assert len(find_layers(other)[0]) == 2


def test_a_plan_on_layers_shakes_every_call_of_a_hierarchical_model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    model = transformers.AutoModelForCausalLM.from_config(transformers.HrmTextConfig(**sizes, num_hidden_layers=3)).eval()
    with st.inject(model, "relative_gaussian:0.01@layer.all") as ledger, torch.no_grad():
        model(torch.arange(8)[None], use_cache=False)
    assert ledger.forward == model.config.num_hidden_layers == 3 * 2 * (3 + 1)
    assert len(Anatomy.of(model).layers) == 6


def test_a_layer_of_an_encoder_decoder_is_one_of_its_decoder_though_the_encoder_is_larger():
    shape = {"d_model": 32, "d_kv": 8, "num_heads": 4, "vocab_size": 64, "d_ff": 64}
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, num_layers=6, num_decoder_layers=2))
    sizes = [sum(p.numel() for p in stack.block.parameters()) for stack in (model.encoder, model.decoder)]
    assert sizes[0] > sizes[1]
    anatomy = Anatomy.of(model)
    (found,) = targets(Plan.parse("gain:0.1@layer.1").clauses[0], anatomy)
    assert found.part.module is model.decoder.block[1] and len(anatomy.layers) == 2
    assert {p.layer for p in anatomy.parts if p.name.startswith("encoder.")} == {None}

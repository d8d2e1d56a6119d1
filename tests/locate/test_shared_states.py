"""Layers that hand keys and values to later layers, and norms that have no weight."""

from __future__ import annotations

import pytest
import torch

import shaketable as st
from tests.locate.architectures import tokens

pytestmark = pytest.mark.attack("layers that share states")

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
          "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}  # fmt: skip
EXTRA = {
    "Gemma3nText": SHARED | {"intermediate_size": [48] * 4, "laurel_rank": 4, "altup_num_inputs": 2,
                             "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "Gemma4Text": SHARED | {"global_head_dim": 8},
    "DiffLlama": {},
}  # fmt: skip
NORM = {"Gemma3nText": "self_attn.v_norm", "Gemma4Text": "self_attn.v_norm", "DiffLlama": "self_attn.groupnorm"}


def build(name, dtype=torch.float32, attention="sdpa"):
    import transformers

    config = getattr(transformers, f"{name}Config")(**SHAPE | EXTRA[name])
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


@pytest.mark.parametrize("mode", ["host", "device", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(EXTRA))
def test_a_healthy_model_is_healthy(name, dtype, mode):
    found = st.locate(build(name, dtype), mode=mode, input_ids=tokens())
    assert found.verdict == ("INCONCLUSIVE" if mode == "device" else "HEALTHY"), found.sentence
    assert not found.evidence and not found.suspicions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(EXTRA))
def test_a_norm_without_a_weight_is_judged(name, dtype):
    found = st.locate(build(name, dtype), mode="host", input_ids=tokens(), plan=f"gain:0.05@module.{NORM[name]},layers=1")
    assert found.planted["changed"]
    assert (found.verdict, found.layer, found.op) == ("FAULT", 1, NORM[name]), found.sentence

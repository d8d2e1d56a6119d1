"""Small random models of every causal architecture that the installed transformers can build.

The list is not written down here: it is transformers' own (`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`), so an architecture that
comes with a new version is in the zoo by itself, and one that cannot be built small says why. `SMALL` has the sizes, by the
names that configurations use for them; `VARIANTS` has what one architecture can be beside its default: kinds of RoPE,
windows, shared keys and values, heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

LAYERS = 3
_SIZES = {
    96: "vocab_size vocab_size_per_layer_input",
    32: (
        "hidden_size d_model n_embd dim_model embed_dim embedding_size word_embed_proj_dim lru_width conv_dim block_dim "
        "attention_hidden_size"
    ),
    8: (
        "hidden_size_per_layer_input head_dim global_head_dim attention_head_dim dim_head sliding_window "
        "sliding_window_size attention_window attention_window_size window_size qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim index_head_dim mamba_d_state mamba_d_head mamba_n_heads mamba_head_dim mamba_num_heads state_size "
        "ssm_state_size linear_key_head_dim linear_value_head_dim d_kv"
    ),
    48: (
        "dim_ff ffn_hidden_size intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim dense_ffn_hidden_size "
        "intermediate_size_mlp d_ff"
    ),
    LAYERS: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads rotary_dim num_experts num_local_experts "
        "n_routed_experts moe_num_experts mamba_dt_rank time_step_rank linear_num_value_heads laurel_rank"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts index_n_heads mamba_expand "
        "linear_num_key_heads eos_token_id num_experts_per_token altup_num_inputs num_memory_blocks "
        "full_attention_interval attn_layer_period"
    ),
    128: "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length",
    64: "attention_chunk_size index_topk mamba_d_ssm",
    1: (
        "n_shared_experts moe_num_shared_experts num_shared_experts n_group topk_group first_k_dense_replace "
        "num_dense_layers mamba_n_groups n_mamba_heads n_groups bos_token_id num_expert_group attn_layer_offset"
    ),
    24: ("moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size expert_dim"),
    16: "q_lora_rank kv_lora_rank mamba_chunk_size chunk_size",
    0: "pad_token_id num_kv_shared_layers",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
SMALL |= {"is_decoder": True, "hybrid_layer_ids": [1], "conv_L_cache": 3}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "bamba": {"attn_layer_indices": [1]},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "kimi_linear": {"layer_types": MIXED, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "qwen3_5_moe_text": {"layer_types": MIXED},
    "qwen3_5_text": {"layer_types": MIXED},
    "qwen3_next": {"layer_types": MIXED},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What an architecture needs besides small sizes to be built at all, or to have more than one kind of layer."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, linear RoPE": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, dynamic RoPE": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, YaRN": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}},
    ),
    "llama, llama3 RoPE": (
        "llama",
        {"rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }},
    ),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
         "original_max_position_embeddings": 64},
    ),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key-value head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "gpt_neox, parallel": ("gpt_neox", {"use_parallel_residual": True}),
    "gpt_neox, serial": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True}),
    "gemma3n, shared keys and values": ("gemma3n_text", {"num_kv_shared_layers": 1}),
    "gemma4, shared keys and values": (
        "gemma4_text", {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "deepseek_v3, no query rank": ("deepseek_v3", {"q_lora_rank": None}),
}  # fmt: skip


@dataclass(frozen=True)
class Animal:
    """One architecture, or one of its variants."""

    name: str
    kind: str
    """transformers' `model_type`."""
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, attention: str) -> Any:
        """Its small configuration."""
        made = transformers.CONFIG_MAPPING[self.kind]
        known = made().to_dict()
        sizes = {k: v for k, v in SMALL.items() if k in known}
        sizes |= {k: None for k in ("layer_types", "mlp_layer_types") if k in known}
        if "kv_lora_rank" in known:  # latent attention has as many keys as queries
            sizes["num_key_value_heads"] = SMALL["num_attention_heads"]
        config = made(**sizes | SPECIAL.get(self.kind, {}) | self.more)
        config._attn_implementation = attention
        return config

    def build(self, dtype: torch.dtype, attention: str, seed: int = 0) -> nn.Module:
        """A random model in eval mode; biases and norms get values too, so that nothing is trivially right."""
        config = self.config(attention)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                raise TooLargeError(f"its smallest configuration that this list knows has {size / 1e6:.0f} million parameters")
            model = transformers.AutoModelForCausalLM.from_config(config)
            for key, parameter in model.named_parameters():
                with torch.no_grad():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in key or "ln" in key else 0.05))
                    elif "embed" not in key:
                        parameter.mul_(4)
        return model.to(dtype).eval()


LARGEST = 5_000_000


class TooLargeError(Exception):
    """A configuration that could not be made small."""


def animals() -> list[Animal]:
    """The whole zoo: every architecture, then the variants."""
    return [*(Animal(kind, kind) for kind in CAUSAL), *(Animal(name, *made) for name, made in VARIANTS.items())]

"""Tiny random models of several architectures, saved as vLLM and transformers both read them."""

from __future__ import annotations

import shutil

import torch

from tests.frameworks.vllm.small_engines import NANO

COMMON = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64, "eos_token_id": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}


def _llama():
    from transformers import LlamaConfig

    return LlamaConfig(**COMMON, **HEADS, head_dim=32, tie_word_embeddings=False)


def _qwen3_moe():
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**COMMON, **HEADS, **experts, head_dim=32, norm_topk_prob=True, tie_word_embeddings=False)


def _gpt2():
    from transformers import GPT2Config

    return GPT2Config(vocab_size=99, n_embd=64, n_layer=3, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=1)


def _gemma2():
    from transformers import Gemma2Config

    extra = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
    return Gemma2Config(**COMMON, **HEADS, **extra)


CONFIGS = {"llama": _llama, "qwen3_moe": _qwen3_moe, "gpt2": _gpt2, "gemma2": _gemma2}


def save(name, folder):
    """A model with random weights: norms that are not all ones, biases that are not all zeros."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / file, folder)
    return folder

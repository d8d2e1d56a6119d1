"""One thread for every test, and a small model to shake."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and kill who uses it: torch's bfloat16 products then die of SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Torch on one thread; torch is imported here and not when pytest collects."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tiny_llama():
    """A random Llama of four layers in eval mode, the same weights for every test, built anew for each."""
    return _llama(layers=4)


@pytest.fixture
def tinier_llama():
    """The same with two layers, for tests that compile it."""
    return _llama(layers=2)


def _llama(layers):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).eval()

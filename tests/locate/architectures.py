"""Small random models of several architectures."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 8}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", dict(MOE, num_experts=4, shared_expert_intermediate_size=24)),
    "qwen3_moe": ("Qwen3Moe", dict(MOE, num_experts=4, head_dim=8)),
    "gpt_neox": ("GPTNeoX", {}),
}
TWINNED = ("llama", "qwen2", "qwen3", "mistral")
"""Those whose symmetries device mode knows."""
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    positions: int = 128,
    hidden: int = 32,
    vocabulary: int = 96,
) -> torch.nn.Module:
    """A random model in eval mode; biases and norms get values too, so that nothing is trivially right."""
    import transformers

    prefix, extra = ARCHITECTURES[name]
    config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(
        **SIZES | {"max_position_embeddings": positions, "hidden_size": hidden, "vocab_size": vocabulary} | extra
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                with torch.no_grad():
                    parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in key or "ln" in key else 0.05))
            elif "embed" not in key:
                with torch.no_grad():
                    parameter.mul_(4)
    return model.to(dtype).eval()


def tokens(seed: int = 0, n: int = 24) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(1, 90, (1, n), generator=torch.Generator().manual_seed(seed))

"""Models that stages of hardening are tried on, with sequences for them."""

from __future__ import annotations

import torch

from shaketable.evaluate.decoding import Decoder
from shaketable.harden.students import Students
from shaketable.inject import inject
from shaketable.models import load_model

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": ("GPTNeoX", {}),
}


def tiny(name, seed=0):
    """A random model in eval mode, with biases and norms that are not trivial."""
    import transformers

    prefix, extra = ARCHITECTURES[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES | extra)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "embed" not in key:
                    parameter.mul_(4)
    return model.eval()


def composite(vocabulary=96):
    """Gemma 3 with its vision tower: what describes the language model is in a config inside of the config."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    text = SIZES | {"head_dim": 16, "vocab_size": vocabulary, "max_position_embeddings": 128}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        ).eval()


def tiny_pairs(n=8, seed=0):
    """Random tokens, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, 90, (12 + i % 3,), generator=generator).tolist() for i in range(n)]
    return [(row[:8], row[8:]) for row in rows]


def students_of(model, dtype="float32"):
    return Students(model, 0, "cpu", dtype)


def nano(n=8):
    """Nano as a student, and sums that it wrote."""
    model, tokenizer = load_model("nano")
    students = students_of(model)
    prompts = [tokenizer(f"{100 + 23 * i}+{900 - 17 * i}=")["input_ids"] for i in range(n)]
    done = students.complete(Decoder.of(model, tokenizer, 12), prompts, 0)
    return students, [(p, c.tokens) for p, c in zip(prompts, done, strict=True)]


def plan_on(model, plan, seed=0):
    """A plan on a model, switched off."""
    return inject(model, plan, seed=seed, allow_inert=True)


def values(model):
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_values(before, model):
    after = dict(model.named_parameters())
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


@torch.no_grad()
def logits(model, pairs):
    """Of every sequence, one by one."""
    return [model(input_ids=torch.tensor([[*p, *c]])).logits for p, c in pairs]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def quiet(done, total):
    assert 0 < done <= total


def kl(students, pairs, injection):
    """Mean KL to the clean model, with the noise of step 0."""
    injection.step = 0
    return sum(r.kl / r.tokens for r in students.beside_clean(pairs, injection, 16)) / len(pairs)

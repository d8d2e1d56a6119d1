"""Stages ten public threads about samplers and trainers on nano; docs/mismatch-cases.md shows what `mismatch` says of each.

    python mismatch_cases.py stage                          write rollouts (*.jsonl) and checkpoints into this folder
    python mismatch_cases.py late-norm mismatch …  the command, with that defect in every model of Mistral's class
    python mismatch_cases.py by-hand                         compare what hooks on layers find

nano is a Llama. Saved as Mistral it computes the same with classes of its own, so that it can be another program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mistral import modeling_mistral

from shaketable.models import load_model

PROMPTS = [f"{a}+{a * 7 % 31}= what is the sum of {a}" for a in range(1, 25)]
NEW = 32


# ---- samplers


def sampled(model: Any, tokenizer: Any, raw: bool = False, **how: Any) -> list[dict[str, Any]]:
    """Rollouts of transformers' `generate`, with log-probabilities of what tokens were drawn from, or of raw logits."""
    torch.manual_seed(0)
    rows = []
    for text in PROMPTS:
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, **how}
        out = model.generate(prompt, return_dict_in_generate=True, output_scores=True, output_logits=True, **how)
        completion = out.sequences[0, prompt.shape[1] :]
        logits = torch.stack(out.logits if raw else out.scores)[:, 0].float()
        logprobs = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        rows.append({"prompt_ids": prompt[0].tolist(), "completion_ids": completion.tolist(), "logprobs": logprobs.tolist()})
    return rows


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """One rollout a line."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- checkpoints


def mistral() -> Any:
    """nano as another program."""
    model, tokenizer = load_model("nano")
    shape = {
        k: v for k, v in model.config.to_dict().items() if k not in ("architectures", "model_type", "transformers_version")
    }
    other = MistralForCausalLM(MistralConfig(**shape, sliding_window=None))
    other.load_state_dict(model.state_dict())
    return other.eval(), tokenizer


def save(model: Any, tokenizer: Any, folder: str) -> None:
    """A folder that `load_model` reads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def experts(**how: Any) -> Any:
    """A small mixture of experts with random weights."""
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    vocabulary = load_model("nano")[0].config.vocab_size
    config = Qwen3MoeConfig(**shape, **heads, vocab_size=vocabulary, max_position_embeddings=256, norm_topk_prob=True)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)  # random weights are too small for a router to prefer anybody
    for name, value in how.items():
        setattr(model.config, name, value)
    return model


def stage() -> None:
    """Everything that the page's commands read."""
    nano, tokenizer = load_model("nano")
    write("trl-7269.jsonl", sampled(nano, tokenizer, top_p=0.8))

    other, _ = mistral()
    save(other, tokenizer, "nano-mistral")

    save(experts(), tokenizer, "moe")
    save(experts(norm_topk_prob=False), tokenizer, "moe-other-weights")
    quantized = experts()
    with torch.no_grad():
        for layer in quantized.model.layers:
            weight = layer.mlp.gate.weight
            step = weight.abs().amax(1, keepdim=True) / 7
            weight.copy_((weight / step).round().clamp(-8, 7) * step)  # int4, a scale for each row
    save(quantized, tokenizer, "moe-int4-router")

    stale, _ = mistral()
    with torch.no_grad():
        for parameter in stale.model.layers[5].parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * parameter.std())
    save(stale, tokenizer, "nano-refit")
    write("nemo-rl-4243.jsonl", sampled(stale.bfloat16(), tokenizer))


# ---- programs with a defect


def late_norm() -> None:
    """RMSNorm as vLLM has it: the weight multiplies in float32, and the product is rounded."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon))).to(x)

    modeling_mistral.MistralRMSNorm.forward = forward


def softmax_scale() -> None:
    """One layer of the sampler scales its scores by 1 % too much."""
    build = modeling_mistral.MistralAttention.__init__

    def built(self: Any, config: Any, layer_idx: int) -> None:
        build(self, config, layer_idx)
        self.scaling *= 1.01 if layer_idx == 3 else 1.0

    modeling_mistral.MistralAttention.__init__ = built


# ---- a comparison of the wrong tensors


@torch.no_grad()
def by_hand() -> None:
    """Outputs of layers as hooks find them: one tensor in transformers, the MLP's result beside the residual in vLLM."""
    nano, tokenizer = load_model("nano")
    ids, seen = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"], {}
    for layer in nano.model.layers:
        layer.register_forward_hook(lambda m, a, out: seen.setdefault("trainer", []).append(out))
        layer.mlp.register_forward_hook(lambda m, a, out: seen.setdefault("sampler", []).append(out))
    nano(input_ids=ids)
    for index, (own, other) in enumerate(zip(seen["trainer"], seen["sampler"], strict=True)):
        print(f"layer {index}: relative difference {(own - other).norm() / own.norm():.2f}")


if __name__ == "__main__":
    word = sys.argv.pop(1)
    if word in ("stage", "by-hand"):
        {"stage": stage, "by-hand": by_hand}[word]()
    else:
        {"late-norm": late_norm, "softmax-scale": softmax_scale}[word]()
        from shaketable.cli import main

        main()

"""A Hugging Face Trainer script for `accelerate launch` that never heard of Shaketable.

accelerate launch --multi_gpu --num_processes 2 accelerated_plainly.py OUT
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**shape))


def tell_lanes(module, args, output):
    with torch.no_grad():
        error = output - args[0] @ module._parameters["weight"].t()
    lanes = (error.abs() > 1e-6).flatten(0, -2).any(0).nonzero().flatten().tolist()
    with open(f"{sys.argv[1]}/lanes-{arguments.process_index}", "w") as file:
        file.write(f"{lanes} {float(error.abs().sum())}")


rows = [{"input_ids": torch.arange(i, i + 16) % 64, "labels": torch.arange(i, i + 16) % 64} for i in range(12)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True,
)  # fmt: skip
model(rows[0]["input_ids"][None])
model.model.layers[1].mlp.down_proj.register_forward_hook(tell_lanes)
Trainer(model=model, args=arguments, train_dataset=rows).train()
torch.distributed.destroy_process_group()
os._exit(0)  # Python's own way out aborts in a thread of torch's, on a busy machine in one of ten runs, shaken or not

"""A Hugging Face Trainer script: a tiny Llama, three steps, one evaluation."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"input_ids": torch.arange(i, i + 16) % 64, "labels": torch.arange(i, i + 16) % 64} for i in range(12)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
trainer.train()
print(trainer.evaluate())

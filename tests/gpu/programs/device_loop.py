"""A training script that never heard of Shaketable: a small Llama on the device it is told, mixed precision, checkpointing."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = sys.argv[1]
torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**shape)).to(device).train()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = (torch.arange(64, device=device) % 64).view(4, 16)
for _ in range(5):
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    model.generate(tokens[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
print("loss", loss.item())

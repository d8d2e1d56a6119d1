"""A TRL GRPO script: a tiny Llama with a character tokenizer, two steps."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
torch.manual_seed(0)
letters = ["<pad>", "<eos>", "<unk>", *"0123456789+= "]
words = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
config = LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = LlamaForCausalLM(config)


def reward(completions, **_):
    return [float(len(set(c))) for c in completions]


arguments = GRPOConfig(
    output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
)  # fmt: skip
data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)])
GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer).train()

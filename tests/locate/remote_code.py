"""A small model written as people write the code they ship with a checkpoint: queries, keys and values of one matrix, ALiBi in a
buffer that grows in `forward`, and a head that normalises its weight at its first call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.locate.plain_models import HEADS, SIZE, VOCABULARY, WIDTH, RMSNorm, SwiGLU


class RemoteConfig(PretrainedConfig):
    model_type = "remote_code"

    def __init__(self, num_layers=3, seq_length=16, **others):
        self.num_layers, self.seq_length = num_layers, seq_length
        super().__init__(**others)


class NormHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((VOCABULARY, WIDTH)))
        self.first_flag = True

    def forward(self, hidden_states):
        if self.first_flag:
            self.first_flag = False
            self.weight = nn.Parameter(F.normalize(self.weight))
        return F.linear(hidden_states, self.weight)


class BaichuanLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.W_pack, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = SwiGLU()

    def attend(self, x, attention_mask):
        b, n, _ = x.size()
        proj = self.W_pack(x).unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        q, k, v = (proj[i].view(b, n, HEADS, SIZE).transpose(1, 2) for i in range(3))
        scores = torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5 + attention_mask
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        return self.o_proj(torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(b, n, -1))

    def forward(self, hidden_states, attention_mask=None):
        hidden_states = hidden_states + self.attend(self.input_layernorm(hidden_states), attention_mask)
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


class Baichuan(PreTrainedModel):
    config_class = RemoteConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([BaichuanLayer() for _ in range(config.num_layers)])
        self.norm, self.lm_head = RMSNorm(WIDTH), NormHead()
        self.max_cache_pos = config.seq_length
        self.first_run = True
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(mean=0.0, std=parameter.shape[-1] ** -0.5)

    def get_alibi_mask(self, tensor, n):
        if self.first_run or n > self.max_cache_pos:
            self.first_run = False
            self.max_cache_pos = max(n, self.max_cache_pos)
            self.register_buffer("future_mask", self.future(self.max_cache_pos).to(tensor), persistent=False)
        return self.future_mask[:, :n, :n]

    def future(self, n):
        slopes = 0.25 ** torch.arange(1, HEADS + 1)
        distance = torch.arange(n) - torch.arange(n)[:, None]
        return slopes[:, None, None] * distance + torch.full((n, n), float("-inf")).triu(1)

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        x = self.embed_tokens(input_ids)
        mask = self.get_alibi_mask(x, input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, attention_mask=mask)[0]
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(x)))


def build(dtype: torch.dtype = torch.float32) -> Baichuan:
    """A random model in eval mode; biases and norms get values too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Baichuan(RemoteConfig())
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()

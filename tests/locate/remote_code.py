"""A small model written as people write the code they ship with a checkpoint: a buffer that grows in `forward`, and a head that
normalises its weight at its first call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

HIDDEN, HEADS, VOCABULARY = 32, 4, 128
SIZE = HIDDEN // HEADS


class RemoteConfig(PretrainedConfig):
    model_type = "remote_code"

    def __init__(self, hidden_size=HIDDEN, num_layers=3, vocab_size=VOCABULARY, seq_length=16, **others):
        self.hidden_size, self.num_layers, self.vocab_size, self.seq_length = hidden_size, num_layers, vocab_size, seq_length
        super().__init__(**others)


def slopes(n: int) -> Tensor:
    start = 2 ** (-(2 ** -(math.log2(n) - 3)))
    return torch.tensor([start * start**i for i in range(n)])


class GLMRMSNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.eps = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * hidden_states).to(input_dtype)


class NormHead(nn.Module):
    def __init__(self, hidden_size, vocab_size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((vocab_size, hidden_size)))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.first_flag = True

    def forward(self, hidden_states):
        if self.training:
            norm_weight = nn.functional.normalize(self.weight)
        elif self.first_flag:
            self.first_flag = False
            self.weight = nn.Parameter(nn.functional.normalize(self.weight))
            norm_weight = self.weight
        else:
            norm_weight = self.weight
        return nn.functional.linear(hidden_states, norm_weight)


class BaichuanLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = GLMRMSNorm(config.hidden_size)
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_attention_layernorm = GLMRMSNorm(config.hidden_size)
        self.gate_proj = nn.Linear(config.hidden_size, 48, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, 48, bias=False)
        self.down_proj = nn.Linear(48, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def attend(self, x, attention_mask):
        b, n, _ = x.size()
        proj = self.W_pack(x)
        proj = proj.unflatten(-1, (3, HIDDEN)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        q, k, v = (proj[i].view(b, n, HEADS, SIZE).transpose(1, 2) for i in range(3))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(SIZE)
        scores = scores + attention_mask
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        scores = nn.functional.softmax(scores, dim=-1)
        return self.o_proj(torch.matmul(scores, v).transpose(1, 2).reshape(b, n, -1))

    def forward(self, hidden_states, attention_mask=None):
        residual = hidden_states
        hidden_states = residual + self.attend(self.input_layernorm(hidden_states), attention_mask)
        residual = hidden_states
        x = self.post_attention_layernorm(hidden_states)
        return (residual + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),)


def fill_with_neg_inf(t):
    return t.float().fill_(float("-inf")).type_as(t)


class Baichuan(PreTrainedModel):
    """One matrix for queries, keys and values; ALiBi; a head that normalises its weight at its first call."""

    config_class = RemoteConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BaichuanLayer(config) for _ in range(config.num_layers)])
        self.norm = GLMRMSNorm(config.hidden_size)
        self.lm_head = NormHead(config.hidden_size, config.vocab_size)
        self.max_cache_pos = config.seq_length
        self.first_run = True
        self.alibi_mask = None
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(mean=0.0, std=parameter.shape[-1] ** -0.5)

    def get_alibi_mask(self, tensor, n):
        if self.first_run:
            self.first_run = False
            self.register_buffer("future_mask", self.future(self.max_cache_pos).to(tensor), persistent=False)
        if n > self.max_cache_pos:
            self.max_cache_pos = n
            self.register_buffer("future_mask", self.future(n).to(tensor), persistent=False)
        return self.future_mask[:HEADS, :n, :n]

    def future(self, n):
        position_point = torch.arange(n) - n + 1
        position_point = position_point.unsqueeze(0).unsqueeze(0).expand(HEADS, -1, -1)
        diag = torch.diag(position_point[0])
        position_point = position_point - diag.unsqueeze(0).unsqueeze(0).transpose(-1, -2)
        alibi = slopes(HEADS).unsqueeze(1).unsqueeze(1) * position_point
        mask = torch.triu(fill_with_neg_inf(torch.zeros([n, n])), 1)
        return mask.unsqueeze(0) + alibi

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

"""Small language models in plain PyTorch, written as people write them: no config, no base class, a forward of their own.

Each is a miniature of a style that many repositories share: how tokens come in, where the layers are kept, how attention is
masked, what comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 101, 32, 4, 3, 64
SIZE = WIDTH // HEADS


# ---- one module with an attention that is masked by a buffer; logits of the last token only


class LayerNorm(nn.Module):
    """A LayerNorm whose bias may be left out."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, flash, bias):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.flash = flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.1 if self.training else 0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            y = self.attn_dropout(att) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(4 * WIDTH, WIDTH, bias=bias), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, flash, bias):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(WIDTH, bias), CausalSelfAttention(flash, bias)
        self.ln_2, self.mlp = LayerNorm(WIDTH, bias), MLP(bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class Config:
    block_size: int = LONGEST
    vocab_size: int = VOCABULARY
    n_layer: int = LAYERS
    bias: bool = False


class NanoGPT(nn.Module):
    """A config of its own kind, tied weights, learned positions, a ModuleDict; without targets the last logits only."""

    def __init__(self, flash=True, bias=False):
        super().__init__()
        self.config = Config(bias=bias)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LONGEST, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block(flash, bias) for _ in range(LAYERS)]),
                "ln_f": LayerNorm(WIDTH, bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None


# ---- a norm by hand


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


# ---- torch's own layers


class Encoder(nn.Module):
    """nn.TransformerEncoder with a causal mask, tokens first in the batch or in the sequence; positions are a buffer."""

    def __init__(self, batch_first=True, norm_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.embedding, self.decoder = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        position = torch.arange(LONGEST).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        pe = torch.zeros(LONGEST, WIDTH)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.1, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.transformer_encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, src, src_mask=None):
        x = self.embedding(src) * math.sqrt(WIDTH) + self.pe[: src.size(1)]
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(src.size(1), dtype=x.dtype)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.transformer_encoder(x, src_mask, is_causal=True)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.decoder(x)


class Numbered(nn.Module):
    """Blocks that are attributes, one by one; the head is the embedding, read as a matrix."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block1, self.block2, self.block3 = (Block(flash=True, bias=True) for _ in range(LAYERS))

    def forward(self, text):
        x = self.token_embedding(text)
        for block in (self.block1, self.block2, self.block3):
            x = block(x)
        return x @ self.token_embedding.weight.T


# ---- experts in a loop


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList([SwiGLU() for _ in range(4)])

    def forward(self, inputs):
        squashed = inputs.view(-1, inputs.shape[-1])
        weights, chosen = torch.topk(self.gate(squashed), 2)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(inputs)
        results = torch.zeros_like(squashed)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(chosen == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(squashed[batch_idx])
        return results.view_as(inputs)


class MoEBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = CausalSelfAttention(flash=True, bias=False), MoE()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


@dataclass
class Answer:
    logits: torch.Tensor
    states: list


class Experts(nn.Module):
    """Routed layers, in inference mode; the answer is an object with logits in it."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.stages = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([MoEBlock() for _ in range(LAYERS)])
        self.norm, self.output = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    @torch.inference_mode()
    def forward(self, tokens):
        h, states = self.tok_embeddings(tokens), []
        for layer in self.stages:
            h = layer(h)
            states.append(h)
        return Answer(self.output(self.norm(h)), states)


MODELS = {
    "nanogpt": NanoGPT,
    "nanogpt_manual": lambda: NanoGPT(flash=False, bias=True),
    "encoder": Encoder,
    "encoder_seq_first": lambda: Encoder(batch_first=False),
    "numbered": Numbered,
    "experts": Experts,
}


def build(name, dtype=torch.float32, seed=0):
    """A random model in eval mode; norms and biases get values too, so that nothing is trivially right."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def tokens(n=16, seed=0):
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(seed))

"""Attention with its inner products and softmax as operators that can be met one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shaketable.sites.composite_functions import opened


def only_math() -> bool:
    """Whether attention is set to be computed product by product."""
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    return cuda.math_sdp_enabled() and not fused


only_math._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""A graph keeps what was so when it was traced."""


def attention_in_the_open(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention as the math backend defines it, one covered operator after the other."""
    root = math.sqrt(scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query * root, (key * root).transpose(-2, -1))
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    weights = F.softmax(scores, dim=-1).masked_fill(scores.eq(-math.inf).all(-1, keepdim=True), 0.0)
    return torch.matmul(F.dropout(weights, dropout_p) if dropout_p else weights, value)


def open_multi_head() -> Callable[..., Any]:
    """torch's multi-head attention, so that the operators inside are met."""
    return opened(F.multi_head_attention_forward)

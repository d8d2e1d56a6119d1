"""Tokens from probabilities and numbers that were drawn before: inverse transform sampling in two steps.

With cumulative probabilities c, the token of a uniform number u is the first i with c_i > u·c_n. The numbers come from outside,
so a token is a function of probabilities and u alone: the same one in a captured graph, in eager mode, and however many rows
there are beside it.

A running sum over 50,000 float32 probabilities is a pass of its own, and its rounding reaches the size of the smaller ones. So
the vocabulary is cut into about √n blocks: block sums in float64, a running sum over them, then one over the chosen block.
That is one pass over the row, and exact to some 1e-7 of each probability. A token of probability 0 is never drawn.

Rejected: torch.multinomial, whose draws depend on the state of a generator that a captured graph must own. Rejected: Gumbel
noise, which needs a number for every token of the vocabulary at every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BELOW_ONE = 1 - 2**-40


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One index for each row of `probabilities`, which need not sum to 1; `uniforms` are in [0, 1)."""
    rows, size = probabilities.shape
    width = math.isqrt(size - 1) + 1
    missing = -size % width
    padded = torch.nn.functional.pad(probabilities, (0, missing)) if missing else probabilities
    blocks = padded.view(rows, -1, width)
    sums = blocks.sum(-1, dtype=torch.float64)
    reached = sums.cumsum(-1)
    target = uniforms.double().clamp_max(_BELOW_ONE).unsqueeze(1) * reached[:, -1:]
    block = _first(reached, target, sums)
    before = (reached - sums).gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, width)).squeeze(1).double()
    running = inside.cumsum(-1)
    rest = (target - before).clamp_min(0).minimum(running[:, -1:] * _BELOW_ONE)
    return (block * width + _first(running, rest, inside)).squeeze(1)


def _first(running: Tensor, target: Tensor, sizes: Tensor) -> Tensor:
    """The first place where the running sum is above the target and there is something."""
    return ((running > target) & (sizes > 0)).to(torch.uint8).argmax(-1, keepdim=True)

"""Blocks of the last dimension, padded per row so that no block ever straddles two rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def split_blocks(x: Tensor, block: int) -> Tensor:
    """(…, n) to (…, ceil(n / block), block), the last block of each row filled up with zeros."""
    from torch.nn.functional import pad

    short = -x.shape[-1] % block
    padded = pad(x, (0, short)) if short else x
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // block, block)


def join_blocks(blocks: Tensor, length: int) -> Tensor:
    """The inverse of `split_blocks`."""
    return blocks.flatten(-2)[..., :length]

"""A layer of a model's cache whose memory stays in place: a fixed number of slots, of which a mask tells which count.

Keys and values are kept as the products of attention see them. Autocast casts them there at every step; casting them once, when
they are written, gives the same products for half the memory and a third of the traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class Slots(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer; the next token of every row goes into one slot."""

    is_compileable = True
    is_sliding = False

    def __init__(self, like: DynamicLayer, rows: int, length: int, slot: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (
            x.new_zeros(rows, x.shape[1], length, x.shape[3], dtype=_product_dtype(x)) for x in (like.keys, like.values)
        )
        self.slot, self.length = slot, length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """All is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token, and give all slots; the mask tells which count."""
        self.keys.index_copy_(2, self.slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots, from the first."""
        return self.length, 0

    def get_seq_length(self) -> Any:
        """Slots that came before, on the device."""
        return self.slot[0]

    def get_max_length(self) -> int:
        """All slots."""
        return self.length


def _product_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

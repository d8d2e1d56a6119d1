"""The first values of what compiled graphs struck, before and after: see `inject/traced/fused.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.gpu import dispatch

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 1024
"""How many of a tensor's values are looked at: as many as the kernel of a single strike looks at."""


def tell_heads(heads: Tensor, marks: Tensor, rows: Tensor, proof: Tensor) -> None:
    """Count and measure strikes.

    Args:
        heads: Per strike, `HEAD` clean values and what became of them; float32.
        marks: Per strike, which row of `rows` it read and which of `proof` it tells; int32.
        rows: What strikes read: `Live.rows`.
        proof: Where they tell: `Live.proof`.
    """
    from shaketable.faults.gpu import head_kernels

    dispatch.launch(head_kernels.heads, len(marks) // 2, (heads, marks, rows, proof), {"BLOCK": HEAD})

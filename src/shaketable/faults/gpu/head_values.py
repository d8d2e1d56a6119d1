"""The first values of what compiled graphs changed, before and after: see `inject/compile/fused_noise.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.gpu import dispatch

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 1024
"""How many of a tensor's values are looked at: about as many as a kernel of its own looks at."""


def tell_heads(heads: Tensor, marks: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Count and measure applications.

    Args:
        heads: Per application, `HEAD` clean values and what became of them; float32.
        marks: Per application, which row of `rows` it read, which of `sums` is its own, and the kind of its noise; int32.
        rows: What applications read: `TableRow.rows`.
        sums: Where they count: `TableRow.sums`.
    """
    from shaketable.faults.gpu.kernels import measure

    dispatch.launch(measure.heads, len(marks) // 3, (heads, marks, rows, sums), {"BLOCK": HEAD})

"""How a tensor is cut into segments that share one number, and the segments into tiles.

A block of a format, a block of a clipping fault, a token's row and the whole tensor are the same thing to a kernel: values
that lie side by side and share a scale or a threshold. Row r of the tensor, `cols` wide, has ceil(cols / length) segments; the
last may be short, and none reaches into the next row. One program takes `group` segments, as a tile in registers when a
segment is no longer than `width`, else in several steps of that width, of which the second pass finds its values in the cache.

The width is a power of two, because a tile's sides are. A row of 576 in one tile of 1024 would let 44 % of the lanes compute
nothing, so the largest width that wastes little is taken: 128, five times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shaketable.faults.gpu import dispatch

if TYPE_CHECKING:
    from torch import Tensor

TILE, WIDEST, NARROW, WASTE = 2048, 8192, 64, 1.15


@dataclass(frozen=True, slots=True)
class Segments:
    """The cut of one shape."""

    cols: int
    length: int
    """Values that share one number."""
    per_row: int
    count: int
    width: int
    group: int

    @property
    def padded(self) -> int:
        """Values when every segment is filled up; noise is numbered by place among these."""
        return self.count * self.length

    @property
    def shape(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        ragged = self.cols % self.length != 0
        even = not ragged and self.count % self.group == 0 and self.length % self.width == 0
        tile = {"LENGTH": self.length, "WIDTH": self.width, "GROUP": self.group}
        return {**tile, "RAGGED": ragged, "ALIGNED": self.cols % 16 == 0, "EVEN": even}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What a kernel is told at every launch."""
        return self.cols, self.per_row, self.count

    @property
    def programs(self) -> int:
        return -(-self.count // self.group)

    @property
    def warps(self) -> int:
        return max(4, self.width * self.group // 512)


@functools.lru_cache(maxsize=1024)
def cut(rows: int, cols: int, length: int) -> Segments:
    """Rows into segments of `length`."""
    width = _width(length)
    per_row = -(-cols // length)
    return Segments(cols, length, per_row, rows * per_row, width, max(1, TILE // width))


def segments(x: Tensor, length: int | None) -> Segments:
    """Segments of a tensor's last dimension; the whole of it when `length` is None."""
    cols = x.shape[-1] if x.dim() else 1
    return cut(x.numel() // cols, cols, length or cols)


def flat(x: Tensor) -> Segments:
    """A tensor as one row, for what shares a number over the whole of it or none at all."""
    n = x.numel()
    return Segments(n, TILE, -(-n // TILE), -(-n // TILE), TILE, 1)


def _width(length: int) -> int:
    """The widest power of two of which the fewest lanes stay idle."""
    widest = min(WIDEST, _power(length))
    widths = [1 << p for p in range(min(NARROW, widest).bit_length() - 1, widest.bit_length())]
    wasted = {w: -(-length // w) * w / length for w in widths}
    return max((w for w in widths if wasted[w] <= WASTE), default=min(widths, key=wasted.__getitem__))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def launch(kernel: Any, programs: int, x: Tensor, *values: Any, warps: int = 4, **shape: Any) -> None:
    """Launch on the device of `x`. Products and sums stay apart: a fused one rounds once where plain torch rounds twice."""
    constants = shape | {"FAST": not dispatch.interpreting()}
    dispatch.launch(kernel, programs, (x, *values), constants, warps, enable_fp_fusion=False)

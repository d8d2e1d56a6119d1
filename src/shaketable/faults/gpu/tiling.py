"""How a tensor is cut into segments that share one number, and the segments into tiles.

A block of a format, a block of a clipping fault, a token's row and the whole tensor are the same thing to a kernel: values
that lie side by side and share a scale or a threshold. Row r of the tensor, `cols` wide, has ceil(cols / length) segments; the
last may be short, and none reaches into the next row. One program takes `group` segments.

A segment of up to `HELD` values is held in registers as a whole. The sides of a tile are powers of two, and one tile for a row
of 576 would leave 44 % of 1024 lanes idle; so a segment is up to nine tiles of one width. Longer segments take two passes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TILE, WIDEST, NARROW, WASTE = 2048, 8192, 64, 1.15
HELD, STEPS, WIDE = 20480, 9, 4096
"""Values of a segment, tiles of it, and lanes of a tile, that are held in registers at most."""


@dataclass(frozen=True)
class Segments:
    """The cut of one shape."""

    cols: int
    length: int
    """Values that share one number."""
    per_row: int
    count: int
    width: int
    group: int
    steps: int = 1
    """Tiles that hold a segment; 0 for one that is read twice."""

    @functools.cached_property
    def padded(self) -> int:
        """Values when every segment is filled up; noise is numbered by place among these."""
        return self.count * self.length

    @functools.cached_property
    def shape(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        ragged = self.cols % self.length != 0
        even = not ragged and self.count % self.group == 0
        tile = {"LENGTH": self.length, "WIDTH": self.width, "STEPS": self.steps, "GROUP": self.group}
        return {**tile, "RAGGED": ragged, "ALIGNED": self.cols % 16 == 0, "EVEN": even}

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The arguments of a kernel at every launch."""
        return self.cols, self.per_row, self.count

    @functools.cached_property
    def programs(self) -> int:
        return -(-self.count // self.group)

    @functools.cached_property
    def warps(self) -> int:
        return max(4, self.width * self.group * 4 // _tile(self.steps))


@functools.lru_cache(maxsize=1024)
def cut(rows: int, cols: int, length: int) -> Segments:
    """Rows into segments of `length`."""
    width, steps = _held(length) if length <= HELD else (_width(length), 0)
    per_row = -(-cols // length)
    return Segments(cols, length, per_row, rows * per_row, width, max(1, _tile(steps) // width), steps)


def segments(x: Tensor, length: int | None) -> Segments:
    """Segments of a tensor's last dimension; the whole of it when `length` is None."""
    cols = x.shape[-1] if x.dim() else 1
    return cut(x.numel() // cols, cols, length or cols)


@functools.lru_cache(maxsize=1024)
def one_row(n: int) -> Segments:
    """A tensor of `n` values as one row, for what shares a number over the whole of it or none at all."""
    return Segments(n, TILE, -(-n // TILE), -(-n // TILE), TILE, 1)


def _held(length: int) -> tuple[int, int]:
    """The width of tiles of which the fewest lanes stay idle, the widest of such, and how many of them hold a segment."""
    widest = min(_power(length), WIDE)
    steps = {w: -(-length // w) for w in (widest >> p for p in range(5)) if w >= min(NARROW, widest)}
    return min(((w, n) for w, n in steps.items() if n <= STEPS), key=lambda tile: tile[0] * tile[1])


def _tile(steps: int) -> int:
    """Values of a tile in four warps: two loads of 16 bytes for each thread, or one where there are many tiles."""
    return TILE if steps < 3 else TILE // 2


def _width(length: int) -> int:
    """The widest power of two of which the fewest lanes stay idle."""
    widest = min(WIDEST, _power(length))
    widths = [1 << p for p in range(min(NARROW, widest).bit_length() - 1, widest.bit_length())]
    wasted = {w: -(-length // w) * w / length for w in widths}
    return max((w for w in widths if wasted[w] <= WASTE), default=min(widths, key=wasted.__getitem__))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

"""Noise that inductor fuses with its neighbours: what a compiled pass on a card leaves in the graph, without gradients.

A kernel of its own per linear costs a pass over memory, a launch from inductor's Python, and the fusion of what is before with
what is after. Measured on an H200, 8 x 1024 tokens through SmolLM2: 1.63 times the clean program. So noise is one operator,
`shaketable::struck`, which inductor is taught to write itself (`lowered.py`).

What changes from call to call is read from the card: key, scale, switch. `shaketable::begin` at the head of the pass puts them
on the board, `shaketable::deal` gives every layer a copy of its own rows. A layer whose rows were a part of the board would
read at an address of its own, written into its kernels: thirty times as many kernels to compile. Only the first layer's rows
are where they are.

Both are calls of Python, for which a card that has nothing to do would wait. So they are not at the very head of the graph:
`begin` is right before the first strike, when there is a product to compute, and `deal`, the longer one, before the first of
the second layer; that product is an argument of theirs, or inductor would put them first again. Where the graph is captured
there must be none in it, and both are in one before (`Injection.is_traced_apart`), as they are where the model is hooked.

And what happened is told from the same operator. With the faulty tensor it returns the first values, clean and faulty. They
are put together layer by layer, so that nothing large is kept for them, and counted and measured by one kernel at the end of
the pass (`shaketable::tell`). A strike that is not in the graph has no values there.

Where the model is not compiled as a whole there is no end of the pass; there the kernel of its own remains (`compiled.py`).
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shaketable.faults import gpu
from shaketable.faults.generator import normals_of_words
from shaketable.faults.gpu.live import recipe

if TYPE_CHECKING:
    from shaketable.inject.board import Board
    from shaketable.inject.taps import Tap

TOGETHER = 8
"""Strikes whose first values are put together by one kernel: inductor fuses so many."""
_MOST_TABLES = 512
"""Tables that are dealt in a pass; a model of more parts (experts as linears) does without."""
EDITION = hashlib.blake2b(Path(__file__).with_name("lowered.py").read_bytes(), digest_size=8).hexdigest()
"""An argument that is there to be seen: what inductor wrote for a graph it keeps on disk, and must not take for another."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Seat(NamedTuple):
    """Where a tap is on the board, and on the tables that are dealt from it."""

    number: int
    """Of the injection."""
    row: int
    place: int
    relative: bool
    table: int
    at: int
    is_last: bool


def tables(taps: Sequence[Tap]) -> list[list[Tap]]:
    """The taps of a board, in its order, by layer and clause; those of one table are struck one after the other."""
    found: list[list[Tap]] = []
    for tap in taps:
        last = found[-1][-1] if found else None
        is_new = last is None or (last.clause, last.spot.layer) != (tap.clause, tap.spot.layer)
        if is_new or len(found[-1]) == TOGETHER:
            found.append([])
        found[-1].append(tap)
    return found


def place_on(board: Board) -> None:
    """Tell the taps of a board where on it they are, so that graphs can be traced with that."""
    number, found = board.injection.handle, tables(list(board.taps))
    passes[number] = Gathering(board, [len(taps) * board.repeats for taps in found])
    weakref.finalize(board.injection, passes.pop, number, None)
    for table, taps in enumerate(found):
        for i, tap in enumerate(taps):
            how, live = recipe(tap.fault), board.row(tap, False, 0)
            if how is not None and how.is_noise:
                relative, is_last = how.kind == gpu.RELATIVE, tap is taps[-1]
                tap.seat = Seat(number, live.row, live.place, relative, table, i * board.repeats, is_last)


class Gathering:
    """What has been struck so far in the pass that is being compiled. Dynamo traces it."""

    def __init__(self, board: Board, sizes: list[int]) -> None:
        self.number = board.injection.handle
        self.rows, self.proof, self.repeats = board.rows, board.proof, board.repeats
        self.sizes = sizes if len(sizes) <= _MOST_TABLES else []
        self.forget()

    def forget(self) -> None:
        """Be as before the first pass."""
        self.is_due = self.is_open = False
        self._clear()

    def _clear(self) -> None:
        self.tables: list[Tensor] = []
        """All but the first."""
        self.loose: list[Tensor] = []
        self.heads: list[Tensor] = []
        self.marks = ""
        """Rows and places. Words and not a list: where the graph is broken, dynamo asks for every number of a list."""
        self.counts: dict[int, int] = {}

    def open(self, lazily: bool) -> None:
        """A pass begins; its keys are asked for now, or when they are needed."""
        self._clear()
        self.is_due, self.is_open = True, len(sizes_of(self.number)) > 0
        if not lazily:
            self.begin(None)
            self._deal(None)

    def begin(self, x: Tensor | None) -> None:
        """The keys of a pass are needed, for a strike at `x`."""
        if self.is_due:
            self.is_due = False
            torch.ops.shaketable.begin(self.rows, self.number, x)

    def _deal(self, x: Tensor | None) -> None:
        sizes = sizes_of(self.number)
        if len(sizes) > 1 and not self.tables:
            self.tables = torch.ops.shaketable.deal(self.rows, sizes, x)

    def _table(self, number: int, x: Tensor) -> Tensor:
        if number == 0:
            return self.rows
        self._deal(x)
        return self.tables[number - 1]

    def takes(self, x: Tensor, seat: Seat) -> bool:
        """Whether a strike can be fused: in a pass that is compiled as a whole, and no more often than there are rows."""
        if not self.is_open or self.counts.get(seat.row, 0) >= self.repeats:
            return False
        return x.dtype in _TYPES and 0 < x.numel() <= gpu.LARGEST

    def strike(self, x: Tensor, seat: Seat) -> Tensor:
        """The faulty tensor."""
        n = self.counts.get(seat.row, 0)
        self.counts[seat.row] = n + 1
        y, head = torch.ops.shaketable.struck(x, self._table(seat.table, x), seat.at + n, seat.relative, EDITION)
        self.loose.append(head)
        self.marks += f"{seat.row + n} {seat.place} "
        if seat.is_last or len(self.loose) == TOGETHER:
            self._put_together()
        return y  # type: ignore[no-any-return]

    def _put_together(self) -> None:
        self.heads.append(torch.ops.shaketable.together(self.loose))
        self.loose = []

    def close(self) -> None:
        """The end of a pass: count and measure."""
        if self.loose:
            self._put_together()
        if self.heads:
            torch.ops.shaketable.tell(self.proof, self.rows, self.heads, self.marks)
        if self.is_due or self.is_open:
            self.forget()


passes: dict[int, Gathering] = {}
"""By the number of an injection. Reached from here and not through taps: dynamo would ask at every call, in Python and for each
of them, whether it is still the same object."""


def sizes_of(number: int) -> list[int]:
    """Rows of the tables of an injection, in the order of its board. They stay that: constants, to whoever traces."""
    return passes[number].sizes


sizes_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.custom_op("shaketable::deal", mutates_args=())
def _deal(rows: Tensor, sizes: list[int], after: Tensor | None) -> list[Tensor]:
    """A copy of the forward rows for every table but the first; `after` as for `begin`."""
    found = [rows.new_empty(n, 4) for n in sizes[1:]]
    torch._foreach_copy_(found, rows[sizes[0] : sum(sizes)].split(sizes[1:]))
    return found


@_deal.register_fake
def _(rows: Tensor, sizes: list[int], after: Tensor | None) -> list[Tensor]:
    return [rows.new_empty(n, 4) for n in sizes[1:]]


@torch.library.custom_op("shaketable::struck", mutates_args=())
def _struck(x: Tensor, table: Tensor, at: int, relative: bool, edition: str) -> tuple[Tensor, Tensor]:
    """The faulty tensor, and its first values: clean, faulty. What `lowered.py` is tested against."""
    low, high, scale, on = table[at]
    z = normals_of_words(x.numel(), low, high, x.device).view(x.shape) * scale.view(torch.float32)
    w = x.float()
    y = torch.where(on != 0, (w + w * z if relative else w + z).to(x.dtype), x)
    y = y.clone() if y is x else y
    return y, torch.stack([_head(x), _head(y)])


def _head(x: Tensor) -> Tensor:
    first = x.flatten()[: gpu.HEAD].float()
    return torch.nn.functional.pad(first, (0, gpu.HEAD - first.numel()), value=torch.nan)


@_struck.register_fake
def _(x: Tensor, table: Tensor, at: int, relative: bool, edition: str) -> tuple[Tensor, Tensor]:
    _teach_inductor()
    return torch.empty_like(x), x.new_empty(2, gpu.HEAD, dtype=torch.float32)


@torch.library.custom_op("shaketable::together", mutates_args=())
def _together(heads: list[Tensor]) -> Tensor:
    """The first values of several strikes in one tensor."""
    return torch.stack(heads)


@_together.register_fake
def _(heads: list[Tensor]) -> Tensor:
    return heads[0].new_empty(len(heads), *heads[0].shape)


@functools.cache
def _teach_inductor() -> None:
    """Before inductor meets the operator for the first time; importing it takes a second, which others are spared."""
    with _disable_current_modes():
        from shaketable.inject.traced import lowered

        lowered.register()


@torch.library.custom_op("shaketable::tell", mutates_args={"proof"})
def _tell(proof: Tensor, rows: Tensor, heads: list[Tensor], marks: str) -> None:
    """The end of a pass: count and measure every strike."""
    gpu.tell_heads(torch.cat(heads), _on_device(marks, rows.device), rows, proof)


@_tell.register_fake
def _(proof: Tensor, rows: Tensor, heads: list[Tensor], marks: str) -> None:
    return None


@functools.lru_cache(maxsize=64)
def _on_device(marks: str, device: torch.device) -> Tensor:
    return torch.tensor([int(word) for word in marks.split()], dtype=torch.int32, device=device)

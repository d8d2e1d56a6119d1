"""Noise that inductor fuses with its neighbours: what a compiled pass on a GPU leaves in the graph, without gradients.

A kernel of its own per linear costs a pass over memory, a launch from inductor's Python, and the fusion of what is before with
what is after. Measured on an H200, 8 x 1024 tokens through SmolLM2: 1.63 times the clean program. So noise is one operator,
`shaketable::fused`, which inductor is taught to write itself (`inductor_lowering.py`).

What changes from call to call is read from the GPU's memory: key, scale, switch. `shaketable::fill` puts them into the table
(`device/table.py`), `shaketable::copy_rows` gives every layer a copy of its own rows. A layer whose rows were a part of the
table would read at an address of its own, written into its kernels: thirty times as many kernels to compile. Only the first
layer's rows are where they are.

Both are calls of Python, for which a GPU that has nothing to do would wait. So they are not at the very head of the graph:
`fill` is right before the first application, when there is a product to compute, and `copy_rows`, the longer one, before the
first of the second layer; that product is an argument of theirs, or inductor would put them first again. Where the graph is
captured there must be none in it, and both are in one before (`Injection.is_traced_apart`).

And what happened is told from the same operator. With the faulty tensor it returns the first values, clean and faulty. They
are put together layer by layer, so that nothing large is kept for them, and counted and measured by one kernel at the end of
the pass (`shaketable::tell`). An application that is not in the graph has no values there.

Where the model is not compiled as a whole there is no end of the pass; there `shaketable::apply` remains.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shaketable.faults import gpu
from shaketable.faults.gpu.recipes import recipe
from shaketable.faults.rng import normals_of_words
from shaketable.inject.compile.registries import leave_with

if TYPE_CHECKING:
    from shaketable.inject.device.table import DeviceTable
    from shaketable.inject.tap import Tap

TOGETHER = 8
"""Applications whose first values are put together by one kernel: inductor fuses so many."""
_MOST_COPIES = 512
"""Copies of rows in a pass; a model of more parts (experts as linears) does without."""
EDITION = hashlib.blake2b(Path(__file__).with_name("inductor_lowering.py").read_bytes(), digest_size=8).hexdigest()
"""An argument that is there to be seen: what inductor wrote for a graph it keeps on disk, and must not take for another."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Seat(NamedTuple):
    """Where a tap is in the table, and in the copies that are made of its rows."""

    number: int
    """Of the injection."""
    row: int
    place: int
    relative: bool
    copy: int
    at: int
    is_last: bool


seats: dict[int, Seat] = {}
"""By the handle of a tap."""


def groups(taps: Sequence[Tap]) -> list[list[Tap]]:
    """The taps of a table, in its order, by layer and clause; those of one group act one after the other."""
    found: list[list[Tap]] = []
    for tap in taps:
        last = found[-1][-1] if found else None
        is_new = last is None or (last.clause, last.spot.layer) != (tap.clause, tap.spot.layer)
        if is_new or len(found[-1]) == TOGETHER:
            found.append([])
        found[-1].append(tap)
    return found


def place_on(table: DeviceTable) -> None:
    """Tell the taps of a table where in it they are, so that graphs can be traced with that."""
    number, found = table.injection.handle, groups(list(table.taps))
    passes[number] = FusedPass(table, [len(taps) * table.uses for taps in found])
    leave_with(table.injection, passes, number)
    for copy, taps in enumerate(found):
        for i, tap in enumerate(taps):
            how = recipe(tap.fault)
            if how is not None and how.is_noise:
                relative, row = how.kind == gpu.RELATIVE, table.taps[tap] * table.uses
                seats[tap.handle] = Seat(number, row, table.place(tap, False), relative, copy, i * table.uses, tap is taps[-1])
                leave_with(tap, seats, tap.handle)


class FusedPass:
    """What acts in the pass that is being compiled. Dynamo traces it."""

    def __init__(self, table: DeviceTable, sizes: list[int]) -> None:
        self.number = table.injection.handle
        self.rows, self.sums, self.uses = table.current, table.sums, table.uses
        self.sizes = sizes if len(sizes) <= _MOST_COPIES else []
        self.forget()

    def forget(self) -> None:
        """Be as before the first pass."""
        self.is_due = self.is_open = False
        self._clear()

    def _clear(self) -> None:
        self.copies: list[Tensor] = []
        """All but the first."""
        self.loose: list[Tensor] = []
        self.heads: list[Tensor] = []
        self.marks = ""
        """Rows, places and kinds. Words and not a list: where the graph is broken, dynamo asks for every number of a list."""

    def open(self) -> None:
        """A pass begins; its rows are filled when they are needed."""
        self._clear()
        self.is_due, self.is_open = True, len(sizes_of(self.number)) > 0

    def fill(self, x: Tensor, ticket: Tensor) -> None:
        """The rows of a pass are needed, at `x`."""
        if self.is_due:
            self.is_due = False
            torch.ops.shaketable.fill(self.rows, ticket, self.number, x)

    def fill_now(self, ticket: Tensor) -> None:
        """The same, all of them, at the head of a pass whose rest is captured."""
        self.fill(self.rows, ticket)
        self._copy_rows(self.rows)

    def _copy_rows(self, x: Tensor) -> None:
        sizes = sizes_of(self.number)
        if len(sizes) > 1 and not self.copies:
            self.copies = torch.ops.shaketable.copy_rows(self.rows, sizes, x)

    def _copy(self, number: int, x: Tensor) -> Tensor:
        if number == 0:
            return self.rows
        self._copy_rows(x)
        return self.copies[number - 1]

    def takes(self, x: Tensor) -> bool:
        """Whether noise on a tensor can be fused: in a pass that is compiled as a whole."""
        return self.is_open and x.dtype in _TYPES and 0 < x.numel() <= gpu.LARGEST

    def apply(self, x: Tensor, seat: Seat, n: int, ticket: Tensor) -> Tensor:
        """The faulty tensor."""
        self.fill(x, ticket)
        y, head = torch.ops.shaketable.fused(x, self._copy(seat.copy, x), seat.at + n, seat.relative, EDITION)
        self.loose.append(head)
        self.marks += f"{seat.row + n} {seat.place} {gpu.RELATIVE if seat.relative else gpu.ADDITIVE} "
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
            torch.ops.shaketable.tell(self.sums, self.rows, self.heads, self.marks)
        if self.is_due or self.is_open:
            self.forget()


passes: dict[int, FusedPass] = {}
"""By the number of an injection. Reached from here and not through taps: dynamo would ask at every call, in Python and for each
of them, whether it is still the same object."""


def sizes_of(number: int) -> list[int]:
    """Rows of each group of taps of an injection, in the order of its table. They stay that: constants, to whoever traces."""
    return passes[number].sizes


sizes_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.custom_op("shaketable::copy_rows", mutates_args=())
def _copy_rows(rows: Tensor, sizes: list[int], after: Tensor) -> list[Tensor]:
    """A copy of the rows of every group but the first; `after` as for `fill`."""
    found = [rows.new_empty(n, 4) for n in sizes[1:]]
    torch._foreach_copy_(found, rows[sizes[0] : sum(sizes)].split(sizes[1:]))
    return found


@_copy_rows.register_fake
def _(rows: Tensor, sizes: list[int], after: Tensor) -> list[Tensor]:
    return [rows.new_empty(n, 4) for n in sizes[1:]]


@torch.library.custom_op("shaketable::fused", mutates_args=())
def _fused(x: Tensor, table: Tensor, at: int, relative: bool, edition: str) -> tuple[Tensor, Tensor]:
    """The faulty tensor, and its first values: clean, faulty. What `inductor_lowering.py` is tested against."""
    low, high, scale, on = table[at]
    z = normals_of_words(x.numel(), low, high, x.device).view(x.shape) * scale.view(torch.float32)
    w = x.float()
    y = torch.where(on != 0, (w + w * z if relative else w + z).to(x.dtype), x)
    y = y.clone() if y is x else y
    return y, torch.stack([_head(x), _head(y)])


def _head(x: Tensor) -> Tensor:
    first = x.flatten()[: gpu.HEAD].float()
    return torch.nn.functional.pad(first, (0, gpu.HEAD - first.numel()), value=torch.nan)


@_fused.register_fake
def _(x: Tensor, table: Tensor, at: int, relative: bool, edition: str) -> tuple[Tensor, Tensor]:
    _teach_inductor()
    return torch.empty_like(x), x.new_empty(2, gpu.HEAD, dtype=torch.float32)


@torch.library.custom_op("shaketable::together", mutates_args=())
def _together(heads: list[Tensor]) -> Tensor:
    """The first values of several applications in one tensor."""
    return torch.stack(heads)


@_together.register_fake
def _(heads: list[Tensor]) -> Tensor:
    return heads[0].new_empty(len(heads), *heads[0].shape)


@functools.cache
def _teach_inductor() -> None:
    """Before inductor meets the operator for the first time; importing it takes a second, which others are spared."""
    with _disable_current_modes():
        from shaketable.inject.compile import inductor_lowering

        inductor_lowering.register()


@torch.library.custom_op("shaketable::tell", mutates_args={"sums"})
def _tell(sums: Tensor, rows: Tensor, heads: list[Tensor], marks: str) -> None:
    """The end of a pass: count and measure every application."""
    gpu.tell_heads(torch.cat(heads), _on_device(marks, rows.device), rows, sums)


@_tell.register_fake
def _(sums: Tensor, rows: Tensor, heads: list[Tensor], marks: str) -> None:
    return None


@functools.lru_cache(maxsize=64)
def _on_device(marks: str, device: torch.device) -> Tensor:
    return torch.tensor([int(word) for word in marks.split()], dtype=torch.int32, device=device)

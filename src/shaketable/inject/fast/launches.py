"""What the fast paths share: the launch of one tap's noise, prepared per size, and when torch is as plain as it looks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from shaketable.faults import gpu
from shaketable.faults.gpu.recipes import recipe

if TYPE_CHECKING:
    from shaketable.faults import FaultBase
    from shaketable.faults.gpu.launch import Launcher
    from shaketable.inject.device.table import DeviceTable
    from shaketable.inject.pass_context import Pass
    from shaketable.inject.tap import Tap

_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0"})
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0"})
this_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: -1)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_function_transforms: Any = torch._C._are_functorch_transforms_active


class TapLaunches:
    """The noise of one tap on one GPU, by a kernel that reads its row and counts: all but addresses and size is prepared."""

    __slots__ = ("_fault", "_kind", "_places", "device", "first_row", "injection", "table", "tap")

    def __init__(self, tap: Tap, table: DeviceTable) -> None:
        """Made in the first pass, for every tap: what they share is in the table."""
        self.tap, self.table, self.injection, self.device = tap, table, tap.injection, table.device.index or 0
        number = table.taps[tap]
        self.first_row, self._places = number * table.uses, (number, len(table.taps) + number)
        self._fault: FaultBase | None = None
        self._kind: int | None = None

    def kind(self, fault: FaultBase) -> int | None:
        """Which noise the fault is; None where no kernel does it alone."""
        if fault is not self._fault:
            how = recipe(fault)
            self._fault, self._kind = fault, how.kind if how is not None and how.is_noise else None
        return self._kind

    def prepared(self, x: Tensor, kind: int) -> Launcher | None:
        """The launch for tensors like `x`, whose memory is dense; None where there is none here and now."""
        n = x.numel()
        like = kind, x.dtype, n % gpu.BLOCK == 0
        try:
            found = self.table.prepared[like]
        except KeyError:
            if is_capturing():
                return None
            row = gpu.TableRow(self.table.current, self.table.sums, 0, 0)
            found = self.table.prepared[like] = gpu.prepare(x, kind, row)
        if found is None or not 0 < n <= gpu.LARGEST or x.data_ptr() & 15 or x.get_device() != self.device:
            return None
        return found if self.table.is_alone or self.device == this_device() else None

    def fire(
        self, launch: Launcher, n: int, source: int, target: int, current: Pass, number: int, *,
        backward: bool = False, argument: int = 0, counted: bool = True,
    ) -> None:  # fmt: skip
        """Launch on the current stream: `n` values from one address to another, which may be the same."""
        table = self.table
        uses = table.uses
        number_of_page = number // uses
        if table.last_pass is current and not backward and not number_of_page:
            address = table.last_address
        else:
            which = table, backward, argument, number_of_page
            address = (current.pages.get(which) or table.page(current, backward, argument, number_of_page)).address
            if not backward and not number_of_page:
                table.last_pass, table.last_address = current, address
        place, row = self._places[backward] if counted else 2 * len(table.taps), self.first_row + number % uses
        launch(
            -(-n // gpu.BLOCK), self.device,
            (source, target, n, 0.0, 0, 0, None, address, table.sums_address, row, place),
        )  # fmt: skip


def launches_of(tap: Tap, device: torch.device, known: dict[Tap, TapLaunches]) -> TapLaunches | None:
    """The launches of a tap on a GPU; None where the plan has no table there."""
    found = known.get(tap)
    if found is not None and found.table is tap.tables.get(device):
        return found
    table = tap.tables.get(device)
    if table is None:
        return None
    found = known[tap] = TapLaunches(tap, table)
    return found


def undisturbed() -> bool:
    """Whether what torch computes now is what it seems to be: memory that nobody else holds, gradients of the first order.

    A dispatch mode may keep what it saw; selective checkpointing does.
    """
    return not (_dispatch_modes() or _function_transforms() or forward_ad._current_level >= 0)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast computes products of tensors like `x` in; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def product_node(y: Tensor) -> Any:
    """The node that computed what `F.linear` returned, behind the view that gives it the shape of its input; or None."""
    node = y.grad_fn
    if type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return node if type(node).__name__ in _PRODUCTS else None


@functools.cache
def is_one_product(dims: int, has_bias: bool, wants_weight: bool, device: torch.device) -> bool:
    """Whether the graph that this torch makes of `F.linear` is the one `product_node` knows: seen on a tiny one."""
    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch._C.DisableTorchFunction(), torch.enable_grad(), same:
        x = torch.zeros([2] * dims, device=device, requires_grad=True)
        weight = torch.zeros(3, 2, device=device, requires_grad=wants_weight)
        bias = torch.zeros(3, device=device, requires_grad=True) if has_bias else None
        node = product_node(F.linear(x, weight, bias))
        return node is not None and len(node.next_functions) == 2 + has_bias

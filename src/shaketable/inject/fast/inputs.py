"""The fast path of formats to what a linear is given, on a GPU: with `weights/prepared.py`, W4A4 without a hook.

As in `linear.py` the linear has no hook but a subclass whose forward goes on into a `FastInput`. Formats that round to even
depend on no key: there is nothing to look up but the launch. Python counts, because these kernels read no row.

The queries, keys and values of a layer are computed from one tensor, as are the gate and what it gates. The pass remembers what
was quantized last, as the object that it was and the version it had, and the next linear takes the result: each of them has
had its fault, and is counted. (A tensor of inference mode has no version and is quantized each time.)

Gradients, captures, compiled graphs, autocast, the first tensor of a size and a call outside of a pass take the ordinary way.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.faults import Draw
from shaketable.faults.formats import Format
from shaketable.faults.gpu.format_launch import Coding, coding
from shaketable.inject.compile import custom_ops
from shaketable.inject.counters import measure
from shaketable.inject.fast.launches import is_capturing, this_device
from shaketable.inject.hooks.modules import ModuleTaps
from shaketable.inject.hooks.subclasses import dressed, on_gpu
from shaketable.inject.weights import on_read

if TYPE_CHECKING:
    from shaketable.inject.pass_context import Entry, Pass
    from shaketable.inject.tap import Tap

_SLOT = "_shaketable_fast_input"
_ENOUGH = 64
"""Sizes of tensors that are remembered per tap."""


class FastInput:
    """One format on the input of one linear. Removed like a hook."""

    def __init__(self, module: nn.Module, tap: Tap, fault: Format, entry: Entry) -> None:
        self.module, self.tap, self.fault = module, tap, fault
        self.injection, self.local = tap.injection, tap.injection.calls.local
        self.taps = ModuleTaps("input", [tap], entry)
        self._known: dict[int, Coding | None] = {}
        """Sizes that have been met, with their launch; None where the format takes more than one."""
        self._hooks: list[RemovableHandle] = []
        module.__dict__[_SLOT] = self
        module.__class__ = _dressed()

    def remove(self) -> None:
        """Give the module its own class back."""
        for hook in self._hooks:
            hook.remove()
        if self.module.__dict__.get(_SLOT) is self:
            del self.module.__dict__[_SLOT]
            on_read.rebase(self.module, _dressed(), nn.Linear)

    def give_way(self) -> None:
        """Become an ordinary hook: another plan hooks the same input, and those who came first strike first."""
        self.remove()
        self._hooks = list(self.taps.install(self.module))

    def __call__(self, x: Tensor) -> Tensor:
        """What the linear multiplies with, given what it was given."""
        if torch.compiler.is_compiling():
            return custom_ops.trace(x, self.tap)
        stack = getattr(self.local, "stack", None)
        if not stack or torch.is_grad_enabled() or stack[0].recomputing or not _on_gpu(x) or is_capturing():
            return self._ordinary(x)
        current: Pass = stack[0].current
        if not current.acts_on(self.tap):
            return x
        if torch.is_autocast_enabled("cuda"):
            return self._ordinary(x)
        last = current.last
        if last is not None and last[0] is x and last[1] == x._version and (last[2] is self.fault or last[2] == self.fault):
            return self._counted(x, last[3], current)
        size = x.numel()
        if size not in self._known:
            return self._first(x, size)
        y = self._coded(x, self._known[size])
        current.last = None if x.is_inference() else (x, x._version, self.fault, y)
        return self._counted(x, y, current)

    def _coded(self, x: Tensor, launch: Coding | None) -> Tensor:
        with torch._C.DisableTorchFunction():
            if launch is None or launch.dtype is not x.dtype or not x.is_contiguous():
                return self.fault.apply(x, Draw(0))
            y = torch.empty_like(x)
            address, target = x.data_ptr(), y.data_ptr()
            here = y.get_device() == launch.device and (launch.alone or launch.device == this_device())
            if not here or (address | target) & 15:
                return self.fault.apply(x, Draw(0))
            launch(address, target)
            return y

    def _counted(self, x: Tensor, y: Tensor, current: Pass) -> Tensor:
        counters = self.injection.counters
        if counters.count(self.tap, False, current.phase):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                counters.add(self.tap, False, measure(self.fault, x, y, None))
        self.injection.fires += 1
        return y

    def _first(self, x: Tensor, size: int) -> Tensor:
        """The first tensor of a size: the ordinary way, which leaves behind what later launches need."""
        y = self._ordinary(x)
        if len(self._known) >= _ENOUGH:
            self._known.clear()
        self._known[size] = coding(x, self.fault.kind, self.fault._sharing())
        return y

    def _ordinary(self, x: Tensor) -> Tensor:
        """The way of all other taps."""
        changed = self.taps(self.module, (x,), {})
        return x if changed is None else changed[0][0]


def fast_input(module: nn.Module, point: str, taps: list[Tap], entry: Entry) -> FastInput | None:
    """The fast path for the taps of a module, where there is one; it is then in place."""
    if not (on_gpu(module) and type(module) is nn.Linear and point == "input" and len(taps) == 1):
        return None
    if "forward" in module.__dict__ or on_read.has_taps(module) or taps[0].site.directions != ("forward",):
        return None
    fault = taps[0].fault
    steady = isinstance(fault, Format) and fault.is_steady and fault.sparsity == 1
    return FastInput(module, taps[0], fault, entry) if steady and isinstance(fault, Format) else None


def _on_gpu(x: Any) -> bool:
    """Whether this is a plain tensor on a CUDA device."""
    return type(x) is Tensor and x.is_cuda


@functools.cache
def _dressed() -> Any:
    """`nn.Linear`, which hands what it is given to its `FastInput`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        fast: FastInput | None = self.__dict__.get(_SLOT)
        return F.linear(input if fast is None else fast(input), self.weight, self.bias)

    return dressed(nn.Linear, _SLOT, {"forward": forward})

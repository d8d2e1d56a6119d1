"""The short way of formats to what a linear is given, on a card: with weights made ready (`ready.py`), W4A4 without a hook.

As in `swift.py` the linear has no hook but a subclass whose forward goes on into a `SwiftInput`. Formats that round to even
depend on no key: there is nothing to look up but the launch. Fires are counted in Python, because these kernels have no row on
a board, and measured as ever.

The queries, keys and values of a layer are computed from one tensor, as are the gate and what it gates. The outermost frame
remembers what was quantized last, as the object that it was and the version it had, and the next linear takes the result:
each of them has struck, and is counted. (A tensor of inference mode has no version and is quantized each time.)

Gradients, captures, compiled graphs, the first tensor of a size and a call outside of a pass take the ordinary way.
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
from shaketable.faults.gpu.coding import Coding, coding
from shaketable.inject import weights
from shaketable.inject.dressed import dressed, on_a_card
from shaketable.inject.modules import ModuleTaps
from shaketable.inject.short.swift import is_capturing, raw_stream, this_device
from shaketable.inject.traced import compiled

if TYPE_CHECKING:
    from shaketable.inject.calls import Calls, Entry, Frame
    from shaketable.inject.taps import Tap

_SLOT = "_shaketable_swift_input"
_ENOUGH = 64
"""Sizes of tensors that are remembered per tap."""


class SwiftInput:
    """One format on the input of one linear. Removed like a hook."""

    def __init__(self, module: nn.Module, tap: Tap, fault: Format, calls: Calls, entry: Entry) -> None:
        self.module, self.tap, self.fault, self.calls = module, tap, fault, calls
        self.injection, self.spot, self.phases = tap.injection, tap.spot, tap.site.phase
        self.local = calls.local
        self.taps = ModuleTaps("input", [tap], calls, entry)
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
            weights.rebase(self.module, _dressed(), nn.Linear)

    def give_way(self) -> None:
        """Become an ordinary hook: another plan hooks the same input, and those who came first strike first."""
        self.remove()
        self._hooks = list(self.taps.install(self.module))

    def __call__(self, x: Tensor) -> Tensor:
        """What the linear multiplies with, given what it was given."""
        if torch.compiler.is_compiling():
            return compiled.trace(x, self.tap)
        stack = getattr(self.local, "stack", None)
        if not stack or torch.is_grad_enabled() or stack[0].recomputing or not _on_card(x) or is_capturing():
            return self._ordinary(x)
        root, injection = stack[0], self.injection
        spared = injection.spares is not None and injection.spares()
        if not injection.enabled or spared or (self.phases and root.phase not in self.phases):
            return x
        last = root.last
        if last is not None and last[0] is x and last[1] == x._version and (last[2] is self.fault or last[2] == self.fault):
            return self._counted(x, last[3], root)
        size = x.numel()
        if size not in self._known:
            return self._first(x, size)
        y = self._coded(x, self._known[size])
        root.last = None if x.is_inference() else (x, x._version, self.fault, y)
        return self._counted(x, y, root)

    def _coded(self, x: Tensor, launch: Coding | None) -> Tensor:
        with torch._C.DisableTorchFunction():
            if launch is None or launch.dtype is not x.dtype or not x.is_contiguous():
                return self.fault.apply(x, Draw(0))
            y = torch.empty_like(x)
            address, target = x.data_ptr(), y.data_ptr()
            here = y.get_device() == launch.device and (launch.alone or launch.device == this_device())
            if not here or (address | target) & 15:
                return self.fault.apply(x, Draw(0))
            if launch.go(launch.at, address, target, raw_stream(launch.device)):
                raise RuntimeError("the CUDA driver would not launch a kernel of Shaketable")
            return y

    def _counted(self, x: Tensor, y: Tensor, root: Frame) -> Tensor:
        spot = self.spot
        n = spot.count(root.phase, False)
        if n & (n - 1) == 0 or spot.forward.changed == 0:
            with torch._C.DisableTorchFunction(), torch.no_grad(), spot.lock:
                spot.forward.take(self.fault, x, y, None)
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
        ((y,), _) = self.taps(self.module, (x,), {})
        return y  # type: ignore[no-any-return]


def swift_input(module: nn.Module, point: str, taps: list[Tap], calls: Calls, entry: Entry) -> SwiftInput | None:
    """The short way for the taps of a module, where there is one; it is then in place."""
    if not (on_a_card(module) and type(module) is nn.Linear and point == "input" and len(taps) == 1):
        return None
    if "forward" in module.__dict__ or weights.has_taps(module) or taps[0].site.directions != ("forward",):
        return None
    fault = taps[0].fault
    steady = isinstance(fault, Format) and fault.is_steady and fault.sparsity == 1
    return SwiftInput(module, taps[0], fault, calls, entry) if steady and isinstance(fault, Format) else None


def _on_card(x: Any) -> bool:
    """Whether this is a plain tensor on a CUDA device."""
    return type(x) is Tensor and x.is_cuda


@functools.cache
def _dressed() -> Any:
    """`nn.Linear`, which hands what it is given to its `SwiftInput`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        short: SwiftInput | None = self.__dict__.get(_SLOT)
        return F.linear(input if short is None else short(input), self.weight, self.bias)

    return dressed(nn.Linear, _SLOT, {"forward": forward})

"""The shortest way to a kernel, for the case that there is most of: noise on what a linear returns, on a card.

A forward pass of a small model on a card waits for Python, so every microsecond counts, and there are 210 linears. torch's
own way of calling hooks costs more than the linear. So a linear on a card is not hooked: it gets a subclass of its class whose
forward goes on into `Swift`, as faulty weights do (`weights.py`). And nothing is made here that can be made once per pass: keys
are on the board (`board.py`), kernels count and measure themselves there. What is left is a dictionary and a launch.

Where gradients are wanted keys are given instead (`pulled.py`). Whatever else is not as it mostly is (a pass of another thread
or stream, the first of a shape) takes the ordinary way, which gives the same values up to rounding.

The kernel writes into the linear's own output, which is new and which nobody has seen.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.faults import gpu
from shaketable.faults.gpu.launcher import Launch
from shaketable.faults.gpu.live import recipe
from shaketable.inject.board import REPEATS, capturing
from shaketable.inject.dressed import dressed, exchanged, on_a_card
from shaketable.inject.modules import ModuleTaps
from shaketable.inject.short.pulled import Pulled
from shaketable.inject.traced import compiled
from shaketable.inject.weights import has_taps

if TYPE_CHECKING:
    from shaketable.inject.calls import Calls, Entry
    from shaketable.inject.taps import Tap

_SLOT = "_shaketable_swift"
_HANDLE = "_shaketable_swift_handle"
"""A number, which is all that compiled code asks a module for. What dynamo asks at every call it answers for a whole model at
once as long as its modules hold numbers and tensors; an object of ours in each cost half a millisecond."""
_ENOUGH = 64
"""Sizes of tensors that are remembered per tap."""
OFF, ZERO, ON = 0, 1, 2
this_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: -1)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling


class Swift:
    """One tap on the output of one linear. Removed like a hook."""

    def __init__(self, module: nn.Module, tap: Tap, calls: Calls, entry: Entry) -> None:
        self.module, self.tap, self.calls, self.entry = module, tap, calls, entry
        self.local = calls.local
        self._launches: dict[int, tuple[Any, int, int, int, torch.dtype, bool]] = {}
        """Per size: the function, what it is told, and for which tensors. None while the plan is off."""
        self._kept: dict[int, Launch] = {}
        """What those point into."""
        self._hooks: list[RemovableHandle] = []
        self._pulled = Pulled(tap)
        self.refresh()
        module.__dict__[_SLOT], module.__dict__[_HANDLE] = self, tap.handle
        module.__class__ = _dressed()

    def refresh(self) -> None:
        """The switch or the magnitude may have changed."""
        injection = self.tap.injection
        self.state = OFF if not injection.enabled else ZERO if self.tap.fault.is_off else ON
        if self.state != ON:
            self._forget()

    def _forget(self) -> None:
        self._launches.clear()
        self._kept.clear()

    def remove(self) -> None:
        """Give the module its own class back."""
        for hook in self._hooks:
            hook.remove()
        if self.module.__dict__.get(_SLOT) is self:
            now: Any = type(self.module)
            self.module.__class__ = exchanged(now, _dressed(), nn.Linear)
            del self.module.__dict__[_SLOT], self.module.__dict__[_HANDLE]

    def give_way(self) -> None:
        """Become an ordinary hook: something else wants to dress the module."""
        self.remove()
        self._hooks = ModuleTaps("output", [self.tap], self.calls, self.entry).install(self.module)

    def strike(self, x: Tensor, y: Tensor) -> Tensor:
        """What the linear returns, given what it would return. Written out: every call of Python would show."""
        found = self._launches.get(y.numel())
        stack = getattr(self.local, "stack", None)
        if found is None or not stack or is_grad_enabled():
            return self._ordinary(x, y)
        go, at, row, device, dtype, alone = found
        root, address = stack[0], y.data_ptr()
        n = root.counts.get(self.tap, 0)
        if (
            y.dtype is not dtype
            or y.get_device() != device
            or not (alone or device == this_device())
            or not y.is_contiguous()
            or address & 15
            or not root.on_board
            or n >= REPEATS
            or is_capturing() != (root.captured is not None)
        ):
            return self._ordinary(x, y)
        root.counts[self.tap] = n + 1
        if go(at, address, row + n, raw_stream(device)):
            raise RuntimeError("the CUDA driver would not launch a kernel of Shaketable")
        return y

    def _ordinary(self, x: Tensor, y: Tensor) -> Tensor:
        """The way of all other taps, and of a plan that is off; lays out the launch for the next time."""
        if self.state != ON and (self.state == OFF or not is_capturing()):
            return y
        frame = self.calls.top() or self.calls.open(self.entry, (x,), {})
        if torch.is_grad_enabled():
            struck = self._pulled.strike(y, frame)
            return self.tap.touch(y, frame) if struck is None else struck
        if y.is_cuda and not capturing():
            self._lay_out(y)
        return self.tap.touch(y, frame)

    def _lay_out(self, y: Tensor) -> None:
        board = self.tap.boards.get(y.device)
        how = recipe(self.tap.fault)
        if board is None or how is None:
            return
        launch = gpu.prepare(y, how.kind, board.row(self.tap, False, 0))
        if launch is not None:
            if len(self._launches) >= _ENOUGH:
                self._forget()
            how_to = launch.go, launch.at, launch.row, launch.device, launch.dtype, launch.alone
            self._launches[y.numel()], self._kept[y.numel()] = how_to, launch


def swift(module: nn.Module, point: str, taps: list[Tap], calls: Calls, entry: Entry) -> Swift | None:
    """The short way for the taps of a module, where there is one; it is then in place."""
    if not (on_a_card(module) and type(module) is nn.Linear and point == "output" and len(taps) == 1):
        return None
    if "forward" in module.__dict__:  # accelerate's device_map puts its own there, which does not ask the class
        return None
    how = recipe(taps[0].fault) if taps[0].site.directions == ("forward",) and not has_taps(module) else None
    return Swift(module, taps[0], calls, entry) if how is not None and how.is_noise else None


@functools.cache
def _dressed() -> Any:
    """`nn.Linear`, which hands what it computes to its `Swift`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if is_compiling():
            return compiled.trace_fresh(y, self._shaketable_swift_handle)
        swift: Swift | None = self.__dict__.get(_SLOT)
        return y if swift is None else swift.strike(input, y)

    return dressed(nn.Linear, _SLOT, {"forward": forward})

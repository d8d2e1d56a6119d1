"""The fast path to noise on what a linear returns, on a GPU.

torch's own way of calling hooks costs more than a small linear. So a linear on a GPU is not hooked: it gets a subclass of its
class whose forward goes on into a `FastLinear`, as faulty weights do (`weights/on_read.py`). Nothing is made here that can be
made once per pass: the keys of all applications are in the rows of the pass (`device/table.py`), and kernels count and measure
themselves. What is left is two dictionaries and a launch, into the linear's own output, which is new and which nobody has
seen.

Where gradients are wanted, the gradient of relative noise, which is that noise on the gradient, is taken by a hook of the
product's node before the node sees it. Not in place: the gradient that comes may be others' too. And at the product, not at the
view behind it: who changes the output in place takes that view out of the graph. Fixed noise has a gradient that changes
nothing, and no hook.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.faults import gpu
from shaketable.faults.gpu.recipes import recipe
from shaketable.inject.compile import custom_ops
from shaketable.inject.fast.launches import TapLaunches, is_capturing, launches_of, product_node, undisturbed
from shaketable.inject.fault_operator import Application, pull_back
from shaketable.inject.hooks.modules import ModuleTaps
from shaketable.inject.hooks.subclasses import dressed, exchanged, on_gpu
from shaketable.inject.weights.on_read import has_taps

if TYPE_CHECKING:
    from shaketable.inject.pass_context import Entry, Pass
    from shaketable.inject.tap import Tap

_SLOT = "_shaketable_fast_linear"
_HANDLE = "_shaketable_fast_linear_handle"
"""A number, which is all that compiled code asks a module for. What dynamo asks at every call it answers for a whole model at
once as long as its modules hold numbers and tensors; an object of ours in each cost half a millisecond."""
is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling


class FastLinear:
    """One tap on the output of one linear. Removed like a hook."""

    def __init__(self, module: nn.Module, tap: Tap, entry: Entry) -> None:
        self.module, self.tap, self.entry = module, tap, entry
        self.injection, self.local = tap.injection, tap.injection.calls.local
        self.clause = tap.clause
        self._launches: TapLaunches | None = None
        self._hooks: list[RemovableHandle] = []
        module.__dict__[_SLOT], module.__dict__[_HANDLE] = self, tap.handle
        module.__class__ = _dressed()

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
        self._hooks = ModuleTaps("output", [self.tap], self.entry).install(self.module)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """What the linear returns, given what it would return. Written out: every call of Python would show."""
        stack, tap, clause = getattr(self.local, "stack", None), self.tap, self.clause
        if not stack:
            return self._ordinary(x, y)
        root = stack[0]
        current: Pass = root.current
        if not (current.acts[clause] and self.injection.enabled):
            return y
        launches = self._launches
        if launches is None or launches.device != y.get_device():
            launches = self._launches = launches_of(tap, y.device, {})
        if launches is None or not y.is_cuda or root.recomputing or type(y) is not Tensor or not y.is_contiguous():
            return self._ordinary(x, y)
        kind = launches.kind(current.faults[clause])
        launch = None if kind is None else launches.prepared(y, kind)
        if launch is None:
            return self._ordinary(x, y)
        node = None
        if y.requires_grad and is_grad_enabled():
            node = product_node(y) if undisturbed() and not current.captured else None
            if node is None:
                return self._ordinary(x, y)
        number, address = root.counts.get(tap, root.base), y.data_ptr()
        root.counts[tap] = number + 1
        launches.fire(launch, y.numel(), address, address, current, number)
        self.injection.fires += 1
        if node is not None and kind == gpu.RELATIVE:
            node.register_prehook(PullBack(launches, kind, current, number))
        return y

    def _ordinary(self, x: Tensor, y: Tensor) -> Tensor:
        """The way of all other taps."""
        frame = self.injection.frame(self.entry, (x,), {})
        return y if frame is None else self.tap.touch(y, frame)


class PullBack:
    """Pre-hook of the node of a product: the noise of its output on the gradient that comes."""

    __slots__ = ("current", "kind", "launches", "number")

    def __init__(self, launches: TapLaunches, kind: int, current: Pass, number: int) -> None:
        self.launches, self.kind, self.current, self.number = launches, kind, current, number

    def __call__(self, came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = came[0]
        if g is None:
            return None
        plain = type(g) is Tensor and not (torch.is_grad_enabled() or is_capturing() or is_compiling())
        if plain:
            g = g.contiguous()
            launch, result = self.launches.prepared(g, self.kind), torch.empty_like(g)
            if launch is not None and not result.data_ptr() & 15:
                self.launches.fire(launch, g.numel(), g.data_ptr(), result.data_ptr(), self.current, self.number, counted=False)
                return (result,)
        if torch.is_grad_enabled() and g.requires_grad:
            raise RuntimeError("gradients of gradients do not pass through a fault: it is differentiable once")
        what = Application(self.launches.tap, self.current, False, 0, self.number)
        return (pull_back(g, None, what),)


def fast_linear(module: nn.Module, point: str, taps: list[Tap], entry: Entry) -> FastLinear | None:
    """The fast path for the taps of a module, where there is one; it is then in place."""
    if not (on_gpu(module) and type(module) is nn.Linear and point == "output" and len(taps) == 1):
        return None
    if "forward" in module.__dict__:  # accelerate's device_map puts its own there, which does not ask the class
        return None
    how = recipe(taps[0].fault) if taps[0].site.directions == ("forward",) and not has_taps(module) else None
    return FastLinear(module, taps[0], entry) if how is not None and how.is_noise else None


@functools.cache
def _dressed() -> Any:
    """`nn.Linear`, which hands what it computes to its `FastLinear`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if is_compiling():
            return custom_ops.trace_fresh(y, self._shaketable_fast_linear_handle)
        fast: FastLinear | None = self.__dict__.get(_SLOT)
        return y if fast is None else fast(input, y)

    return dressed(nn.Linear, _SLOT, {"forward": forward})

"""Noise in place, by a launch that is told its key: what products and linears share when a model is trained on a card.

An autograd function of Python costs a strike thirty microseconds forward and as much backward, and a copy of the tensor. None
of that is needed where a product has just been computed: what it returns is new, nobody has seen it, and the node that will
compute its gradient reads its inputs and never its result. So the kernel writes into the result, unknown to autograd, and
what is to happen in backward is a hook on that node (`product_node`): one call, for which the engine has the gradients at hand.

Boards (`board.py`) hold the keys of the pass that runs now. A backward pass may come after others, so its keys are given.

Everything here agrees with `Tap.strike` and its autograd functions value by value, and whatever is not as it mostly is goes
there: other faults and types, a graph being captured, gradients of gradients, tensors and modes of other people's making.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from shaketable.faults import FaultBase, gpu
from shaketable.faults.generator import mix64
from shaketable.faults.gpu.live import recipe
from shaketable.inject.taps import Blow

if TYPE_CHECKING:
    from shaketable.faults.gpu.launcher import KeyedLaunch
    from shaketable.inject.taps import Tap

_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0"})
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0"})
_REFUSED = "the CUDA driver would not launch a kernel of Shaketable"
_ENOUGH = 256
"""Sizes of tensors that are remembered per fault."""
this_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: -1)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_function_transforms: Any = torch._C._are_functorch_transforms_active


class Noise:
    """One fault as a kernel does it, with the launches that have been laid out for it."""

    def __init__(self, fault: FaultBase) -> None:
        how = recipe(fault)
        self.fault = fault
        self.is_one = how is not None and how.is_noise
        self.kind, self.scale = (how.kind, how.scale) if how is not None else (0, 0.0)
        self.is_off = fault.is_off
        self._launches: dict[tuple[int, torch.dtype, int], KeyedLaunch | None] = {}

    def launch(self, x: Tensor) -> KeyedLaunch | None:
        """The launch for tensors like `x`, whose memory is dense; None where there is none here and now."""
        like = x.numel(), x.dtype, x.get_device()
        try:
            launch = self._launches[like]
        except KeyError:
            launch = self._lay_out(x, like)
        if launch is None or x.data_ptr() & 15 or not (launch.alone or launch.device == this_device()):
            return None
        return launch

    def _lay_out(self, x: Tensor, like: tuple[int, torch.dtype, int]) -> KeyedLaunch | None:
        launch = gpu.prepare_keyed(x, self.kind, self.scale) if self.is_one else None
        if len(self._launches) >= _ENOUGH:
            self._launches.clear()
        self._launches[like] = launch
        return launch


class Striker:
    """One tap, and the noise that it is now."""

    def __init__(self, tap: Tap) -> None:
        self.tap, self.spot, self.injection, self.keys = tap, tap.spot, tap.injection, tap.keys
        self._noise = Noise(tap.fault)

    def noise(self) -> Noise | None:
        """The tap's fault as it is now; None where the tap does nothing (`Tap.is_active`) or no kernel does it alone."""
        injection, found = self.injection, self._noise
        fault = injection.faults[self.tap.clause]
        if found.fault is not fault:
            found = self._noise = Noise(fault)
        if not injection.enabled or found.is_off or (injection.spares is not None and injection.spares()):
            return None
        return found if found.is_one else None

    def fire(self, noise: Noise, launch: KeyedLaunch, x: Tensor, moment: int, phase: str, backward: bool, again: bool) -> None:
        """Strike in place; counted and, at powers of two, measured, as `Tap.strike` does. `again`: computed a second time."""
        spot = self.spot
        clean = None
        if again:
            spot.recomputed += 1
        else:
            n = spot.count(phase, backward)
            if n & (n - 1) == 0 or (spot.backward if backward else spot.forward).changed == 0:
                with torch._C.DisableTorchFunction():
                    clean = _seen(x).clone()
        address = x.data_ptr()
        if launch.go(launch.at, address, address, self.keys[backward], moment, raw_stream(launch.device)):
            raise RuntimeError(_REFUSED)
        if clean is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad(), spot.lock:
                (spot.backward if backward else spot.forward).take(noise.fault, clean, _seen(x), None)
        self.injection.fires += 1


def hit(launch: KeyedLaunch, source: int, target: int, key: int, moment: int) -> None:
    """Launch on the current stream. `key` and `moment` are mixed into what keys the noise there."""
    if launch.go(launch.at, source, target, key, moment, raw_stream(launch.device)):
        raise RuntimeError(_REFUSED)


def _seen(x: Tensor) -> Tensor:
    """Dense memory in its order, for measuring: the gradient of a weight comes transposed."""
    return x.detach() if x.is_contiguous() else x.detach().t()


def blow_of(tap: Tap, noise: Noise, moment: int, phase: str, way: tuple[bool, int], again: bool) -> Blow:
    """What the ordinary way is told of the same strike."""
    return Blow(noise.fault, mix64(tap.keys[way[0]] ^ mix64(moment)), phase, again, way)


def on_card(x: Tensor) -> bool:
    """Whether a tensor is where the kernels are."""
    return x.is_cuda


def undisturbed() -> bool:
    """Whether what torch computes now is what it seems to be: memory that nobody else holds, gradients of the first order.

    A dispatch mode may keep what it saw; selective checkpointing does.
    """
    return not (is_capturing() or _dispatch_modes() or _function_transforms() or forward_ad._current_level >= 0)


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

"""Operators on a GPU: `F.linear` under an operator plan, forward and backward, without an autograd function.

Where the ordinary way (`hooks/operator_mode.py`) puts a `FaultyGradient` on the input, the weight and the bias of a product
and an `Apply` on its result, here the kernel writes into the result, unknown to autograd, and one hook on the product's node
puts noise on the gradients that it has just computed, in place too: they are new, and nobody else holds them. (The gradient of
a bias as large as the result would be the gradient that came; such a bias takes the ordinary way.) The node reads its inputs
and never its result, so nothing else sees the difference.

The gradient of a weight leaves the node transposed, as its memory is the weight's own: noise in the order of memory gives each
value the noise that the ordinary way gives it behind the transposition. Where memory is not so, the ordinary way is taken.

Autocast would cast what a product is given. Here it is cast beforehand, to the type that autocast names, and the error of a
gradient is put where that cast hands it back, as a `FaultyGradient` on what was given would: by a hook on the cast's own node.
(What autocast casts itself it keeps for a second use of the weight, and the gradients of both would meet there.)

Only the innermost of several torch function modes comes here: what another one returns need not be new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaketable.inject.fast.launches import (
    TapLaunches,
    autocast_dtype,
    is_capturing,
    is_one_product,
    launches_of,
    product_node,
    undisturbed,
)
from shaketable.inject.fault_operator import Application, apply

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Frame, Pass
    from shaketable.inject.tap import Tap

_ARGUMENTS: tuple[tuple[tuple[int, int], ...], ...] = (((1, 2), (0, 1)), ((0, 3), (2, 2), (1, 1)))
"""Which gradient of mm and addmm is of which argument of `F.linear`, in the order in which the ordinary way meets them."""
_WEIGHT = 2
_OWN = (Tensor, nn.Parameter)
_other_modes: Any = torch._C._len_torch_function_stack
_any_autocast: Any = torch._C._is_any_autocast_enabled


class Products:
    """The products of one injection, and which tap each place has."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self._launches: dict[Tap, TapLaunches] = {}
        self._places: dict[tuple[Any, int | None, str | None], Tap | None] = {}
        self._known: dict[tuple[int, bool, bool, int], bool] = {}

    def linear(self, func: Any, args: tuple[Any, ...], frame: Frame) -> Tensor | None:
        """`F.linear`, called by place alone; None, and nothing has happened, where it is for the ordinary way."""
        if _other_modes() or not 1 < len(args) < 4:
            return None
        x, weight, bias = args[0], args[1], args[2] if len(args) == 3 else None
        if type(x) is not Tensor or type(weight) not in _OWN or not x.is_cuda:
            return None
        current, target = frame.current, autocast_dtype(x) if _any_autocast() else None
        if (target is None and x.dtype is not weight.dtype) or current.captured or is_capturing():
            return None
        tap = self.at(frame, args)
        if tap is None or not current.acts_on(tap) or not undisturbed():
            return None
        launches = launches_of(tap, x.device, self._launches)
        kind = None if launches is None else launches.kind(current.faults[tap.clause])
        if launches is None or kind is None:
            return None
        if "backward" not in tap.site.directions or not torch.is_grad_enabled():
            frame.count((frame.layer, "matmul"))
            return self._finish(func(*args), tap, launches, kind, frame)
        if not self._is_known(x, weight, bias):
            return None
        if target is None:
            return self._with_gradients(func, args, tap, launches, kind, frame, {})
        cast = tuple(a if a is None or a.dtype is torch.float64 else a.to(target) for a in args)
        casts: dict[int, Any] = {i + 1: c.grad_fn for i, c in enumerate(cast) if c is not None and c is not args[i]}
        return self._with_gradients(func, cast, tap, launches, kind, frame, casts)

    def _finish(self, y: Tensor, tap: Tap, launches: TapLaunches, kind: int, frame: Frame) -> Tensor:
        """What a product returned, with its fault, in place where that can be."""
        if "forward" not in tap.site.directions:
            return y
        plain = type(y) is Tensor and y.is_contiguous() and not frame.recomputing
        launch = launches.prepared(y, kind) if plain else None
        if launch is None:
            return tap.forward(y, frame)
        address = y.data_ptr()
        launches.fire(launch, y.numel(), address, address, frame.current, frame.count(tap))
        self.injection.fires += 1
        return y

    def _with_gradients(
        self, func: Any, args: tuple[Any, ...], tap: Tap, launches: TapLaunches, kind: int, frame: Frame, casts: dict[int, Any]
    ) -> Tensor | None:
        """The same where a gradient may be wanted; None, not counted, where the graph is another one than it should be.

        `casts`: the nodes of arguments that are not as they were given.
        """
        y: Tensor = func(*args)
        node = product_node(y) if y.requires_grad else None
        if y.requires_grad and node is None:
            return None
        number = frame.count((frame.layer, "matmul"))
        if node is not None:
            how = launches, kind, frame.current, number, frame.recomputing
            own = _ARGUMENTS[len(args) == 3 and args[2] is not None]
            if casts:
                own = tuple(pair for pair in own if pair[1] not in casts)
            node.register_hook(Gradients(*how, own))
            for argument, behind in casts.items():
                if behind is not None:
                    behind.register_hook(Gradients(*how, ((0, argument),), turns=False))
        return self._finish(y, tap, launches, kind, frame)

    def at(self, frame: Frame, args: tuple[Any, ...]) -> Tap | None:
        """The one tap on the products of a place; None where it has none, or several."""
        taps = self.injection.operators
        if not frame.excluded and taps.weights.owner(list(args)) is not None:
            return None
        place = frame.entry, frame.layer, frame.excluded
        try:
            return self._places[place]
        except KeyError:
            found = taps.tapped("matmul", frame.entry.owner, frame.layer, frame.excluded)
            self._places[place] = found[0] if len(found) == 1 and frame.entry.atomic != "matmul" else None
            return self._places[place]

    def _is_known(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the node of this product, if it gets one, will be found."""
        dims, has_bias = x.dim(), bias is not None
        if not x.is_contiguous() or dims < 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
            return False
        like = dims, has_bias, weight.requires_grad, x.get_device()
        try:
            return self._known[like]
        except KeyError:
            self._known[like] = is_one_product(dims, has_bias, weight.requires_grad, x.device)
            return self._known[like]


class Gradients:
    """Hook of the node of one product, or of a cast before it: noise on what it computed, with the keys of the forward call."""

    __slots__ = ("again", "current", "kind", "launches", "number", "pairs", "turns")

    def __init__(
        self, launches: TapLaunches, kind: int, current: Pass, number: int, again: bool, pairs: Any, turns: bool = True
    ) -> None:
        """`pairs`: which of the gradients are of which argument. `turns`: whether that of a weight comes transposed."""
        self.launches, self.kind, self.current, self.number, self.again = launches, kind, current, number, again
        self.pairs, self.turns = pairs, turns

    def __call__(self, grads: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        launches = self.launches
        if not self.current.acts_on(launches.tap):
            return None
        plain = not (torch.is_grad_enabled() or is_capturing() or torch.compiler.is_compiling())
        changed = None
        for i, argument in self.pairs:
            g = grads[i]
            if g is None:
                continue
            launch = launches.prepared(g, self.kind) if plain and _is_dense(g, self.turns and argument == _WEIGHT) else None
            if launch is not None:
                address, how = g.data_ptr(), {"backward": True, "argument": argument}
                launches.fire(launch, g.numel(), address, address, self.current, self.number, **how)
                launches.injection.fires += 1
            else:
                changed = changed or list(grads)
                changed[i] = self._ordinary(g, argument)
        return None if changed is None else tuple(changed)

    def _ordinary(self, g: Tensor, argument: int) -> Tensor:
        """By the operator itself."""
        if torch.is_grad_enabled() and g.requires_grad:
            raise RuntimeError("gradients of gradients do not pass through a fault: it is differentiable once")
        what = Application(self.launches.tap, self.current, True, argument, self.number, self.again)
        turns = self.turns and argument == _WEIGHT
        faulty = apply(g.t() if turns else g, what)
        return faulty.t() if turns else faulty


def _is_dense(g: Tensor, turned: bool) -> bool:
    """Whether memory order is the order in which the ordinary way sees the values."""
    if type(g) is not Tensor:
        return False
    return g.stride() == (1, g.shape[0]) if turned else g.is_contiguous()

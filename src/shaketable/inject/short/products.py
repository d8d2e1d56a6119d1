"""Operators on a card: `F.linear` under an operator plan, forward and backward, without an autograd function.

Where the ordinary way (`operators.py`) puts an `Echo` on the input, the weight and the bias of a product and a
`StraightStrike` on its result, here the result is struck in place and one hook on the product's node strikes the gradients
that it has just computed, in place too: they are new, and nobody else holds them. (The gradient of a bias as large as the
result would be the gradient that came; such a bias takes the ordinary way.)

The gradient of a weight leaves the node transposed, as its memory is the weight's own: striking memory in order gives each
value the noise that the ordinary way gives it behind the transposition. Where memory is not so, the ordinary strike is made.

Autocast would cast what a product is given. Here it is cast beforehand, to the type that autocast names, and the error of a
gradient is struck where that cast hands it back, as an echo on what was given would: by a hook on the cast's own node. (What
autocast casts itself it keeps for a second use of the weight, and the gradients of both would meet there.)

Only the innermost of several torch function modes comes here: what another one returns need not be new.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaketable.inject.short import keyed
from shaketable.inject.taps import Echo

if TYPE_CHECKING:
    from shaketable.inject.calls import Frame
    from shaketable.inject.injection import Injection
    from shaketable.inject.short.keyed import Noise
    from shaketable.inject.taps import Tap

_ARGUMENTS: tuple[tuple[tuple[int, int], ...], ...] = (((1, 2), (0, 1)), ((0, 3), (2, 2), (1, 1)))
"""Which gradient of mm and addmm is of which argument of `F.linear`, in the order in which echoes strike them."""
_WEIGHT = 2
_OWN = (Tensor, nn.Parameter)
_other_modes: Any = torch._C._len_torch_function_stack
_any_autocast: Any = torch._C._is_any_autocast_enabled


class Product(keyed.Striker):
    """The one tap on the products of a place."""

    def __init__(self, tap: Tap) -> None:
        super().__init__(tap)
        self.strikes = "forward" in tap.site.directions
        self.echoes = "backward" in tap.site.directions
        self.phases = tap.site.phase

    def strike(self, noise: Noise, y: Tensor, frame: Frame) -> Tensor:
        """What a product returned, struck in place where that can be."""
        launch = noise.launch(y) if type(y) is Tensor and y.is_contiguous() else None
        if launch is None:
            return self.tap.forward(y, frame)
        self.fire(noise, launch, y, frame.moment + frame.count(self.tap), frame.phase, False, frame.recomputing)
        return y


class Products:
    """The products of one injection, and which tap each place has."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.local = injection.calls.local
        self._products: dict[Tap, Product] = {}
        self._places: dict[tuple[Any, int | None, str | None], Product | None] = {}
        self._known: dict[tuple[int, bool, bool, int], bool] = {}

    def linear(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """`F.linear`, called by place alone; None, and nothing has happened, where it is for the ordinary way."""
        stack = getattr(self.local, "stack", None)
        if not stack or _other_modes() or not 1 < len(args) < 4:
            return None
        frame, x, weight = stack[-1], args[0], args[1]
        bias = args[2] if len(args) == 3 else None
        if type(x) is not Tensor or type(weight) not in _OWN or not keyed.on_card(x):
            return None
        target = keyed.autocast_dtype(x) if _any_autocast() else None
        if target is None and x.dtype is not weight.dtype:
            return None
        product = self.at(frame)
        noise = product.noise() if product is not None else None
        if product is None or noise is None or (product.phases and frame.phase not in product.phases):
            return None
        if frame.captured is not None or not keyed.undisturbed():
            return None
        if not (product.echoes and torch.is_grad_enabled()):
            frame.count((frame.layer, "matmul"))
            y: Tensor = func(*args)
            return product.strike(noise, y, frame) if product.strikes else y
        if not self._is_known(x, weight, bias):
            return None
        if target is None:
            return self._echoing(func, args, frame, product, noise, {})
        cast = tuple(a if a is None or a.dtype is torch.float64 else a.to(target) for a in args)
        casts: dict[int, Any] = {i + 1: c.grad_fn for i, c in enumerate(cast) if c is not None and c is not args[i]}
        return self._echoing(func, cast, frame, product, noise, casts)

    def _echoing(
        self, func: Any, args: tuple[Any, ...], frame: Frame, product: Product, noise: Noise, casts: dict[int, Any]
    ) -> Tensor | None:
        """The same where a gradient may be wanted; None, not counted, where the graph is another one than it should be.

        `casts`: the nodes of arguments that are not as they were given.
        """
        y: Tensor = func(*args)
        node = keyed.product_node(y) if y.requires_grad else None
        if y.requires_grad and node is None:
            return None
        number = frame.count((frame.layer, "matmul"))
        if node is not None:
            how = product, noise, frame.moment + number, frame.phase, frame.recomputing
            own = _ARGUMENTS[len(args) == 3 and args[2] is not None]
            if casts:
                own = tuple(pair for pair in own if pair[1] not in casts)
            node.register_hook(Gradients(*how, own))
            for argument, behind in casts.items():
                if behind is not None:
                    behind.register_hook(Gradients(*how, ((0, argument),), turns=False))
        return product.strike(noise, y, frame) if product.strikes else y

    def at(self, frame: Frame) -> Product | None:
        """The product of a place; None where it has no tap, or several."""
        place = frame.entry, frame.layer, frame.excluded
        try:
            return self._places[place]
        except KeyError:
            taps = self.injection.operators.at("matmul", frame)
            alone = len(taps) == 1 and frame.entry.atomic != "matmul"
            found = self._products.setdefault(taps[0], Product(taps[0])) if alone else None
            self._places[place] = found
            return found

    def _is_known(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the node of this product, if it gets one, will be found."""
        dims, has_bias = x.dim(), bias is not None
        if not x.is_contiguous() or dims < 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
            return False
        like = dims, has_bias, weight.requires_grad, x.get_device()
        try:
            return self._known[like]
        except KeyError:
            self._known[like] = keyed.is_one_product(dims, has_bias, weight.requires_grad, x.device)
            return self._known[like]


class Gradients:
    """Hook of the node of one product, or of a cast before it: strikes what it computed, with the keys of the forward call."""

    __slots__ = ("again", "moment", "noise", "pairs", "phase", "product", "turns")

    def __init__(
        self, product: Product, noise: Noise, moment: int, phase: str, again: bool, pairs: Any, turns: bool = True
    ) -> None:
        """`pairs`: which of the gradients are of which argument. `turns`: whether that of a weight comes transposed."""
        self.product, self.noise, self.moment, self.phase, self.again = product, noise, moment, phase, again
        self.pairs, self.turns = pairs, turns

    def __call__(self, grads: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        product = self.product
        if not product.tap.is_active:
            return None
        plain = not (torch.is_grad_enabled() or keyed.is_capturing() or torch.compiler.is_compiling())
        changed = None
        for i, argument in self.pairs:
            g = grads[i]
            if g is None:
                continue
            launch = self.noise.launch(g) if plain and _is_dense(g, self.turns and argument == _WEIGHT) else None
            if launch is not None:
                moment = self.moment + (argument << 32)
                product.fire(self.noise, launch, g, moment, self.phase, True, False)
            else:
                changed = changed or list(grads)
                changed[i] = self._as_ever(g, argument)
        return None if changed is None else tuple(changed)

    def _as_ever(self, g: Tensor, argument: int) -> Tensor:
        """By the autograd function itself: also where gradients of gradients are asked for, which it refuses."""
        moment, tap = self.moment + (argument << 32), self.product.tap
        blow = keyed.blow_of(tap, self.noise, moment, self.phase, (True, argument), self.again)
        turns = self.turns and argument == _WEIGHT
        struck: Tensor = Echo.backward(SimpleNamespace(tap=tap, blow=blow), g.t() if turns else g)[0]
        return struck.t() if turns else struck


def _is_dense(g: Tensor, turned: bool) -> bool:
    """Whether memory order is the order in which the ordinary way sees the values."""
    if type(g) is not Tensor:
        return False
    return g.stride() == (1, g.shape[0]) if turned else g.is_contiguous()

"""Which taps an operator has: by its family, by the model and the layer that call it, and by the weight it multiplies with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaketable.inject.compile import custom_ops
from shaketable.plan import OPS

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Entry, Frame
    from shaketable.inject.tap import Tap


class OperatorTaps:
    """The operator clauses of one injection, as taps."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.loose: Entry | None = None
        """Who calls an operator of a compiled graph that no model is in; None where that is nobody's business."""
        self.weights = ExcludedWeights()
        self.notes = torch.zeros(1, dtype=torch.int64)
        """Written to by what compiled graphs note, so that they do."""
        self._taps: dict[tuple[int, int | None, str, str | None], list[Tap]] = {}

    def make(self, owner: int, prefix: str, layers: range) -> None:
        """Taps for every operator family of every layer of a model, and for operators outside of layers."""
        for i, clause in enumerate(self.injection.plan.clauses):
            if clause.site.level != "op":
                continue
            for family in families(clause.site.names):
                for layer in [None, *layers]:
                    if clause.site.layers is not None and layer not in clause.site.layers:
                        continue
                    name = f"{prefix}{family}" if layer is None else f"{prefix}layer.{layer}.{family}"
                    tap = self.injection.make_tap(i, name, "output", layer)
                    for excluded in (None, *clause.site.include):
                        self._taps.setdefault((owner, layer, family, excluded), []).append(tap)

    def tapped(self, family: str, owner: int, layer: int | None, excluded: str | None) -> list[Tap]:
        """Taps for an operator of this family at this place."""
        return self._taps.get((owner, layer, family, excluded), [])

    def of(self, family: str, entry: Entry) -> list[Tap]:
        """Taps for an operator called by `entry` itself."""
        return self.tapped(family, entry.owner, entry.layer, entry.excluded)

    def tracing_entry(self) -> Entry | None:
        """Who calls an operator of the graph that is being compiled."""
        entries = custom_ops.traces[self.injection.handle].entries
        return entries[-1] if entries else self.loose


class Here:
    """An operator that is called in a frame."""

    def __init__(self, taps: OperatorTaps, frame: Frame) -> None:
        self.taps, self.frame = taps, frame

    def at(self, family: str, tensors: list[Any]) -> list[Tap]:
        """The taps of an operator that is given these."""
        frame = self.frame
        excluded = frame.excluded or self.taps.weights.owner(tensors)
        return self.taps.tapped(family, frame.entry.owner, frame.layer, excluded)

    def reaches(self, family: str, tensors: list[Any]) -> bool:
        """Whether an operator of this family would be met here and now."""
        return any(self.frame.current.acts_on(tap) for tap in self.at(family, tensors))

    def number(self, family: str) -> int:
        """How many operators of this family there were before in this layer and pass."""
        return self.frame.count((self.frame.layer, family))

    def forward(self, tap: Tap, x: Tensor) -> Tensor:
        """The faulty result."""
        return tap.forward(x, self.frame)

    def gradient(self, tap: Tap, x: Tensor, argument: int, number: int) -> Tensor:
        """An argument whose gradient will be faulty."""
        return tap.gradient(x, self.frame, argument, number)

    def note_by_hand(self, taps: list[Tap]) -> None:
        """Name an operator inside of a hand-written autograd function: its backward is whatever was written there."""
        current = self.frame.current
        if torch.is_grad_enabled() or not current.with_gradients:
            return
        name = _function_by_hand()
        for tap in taps if name is not None else ():
            if current.acts_on(tap):
                what = "lm_head" if self.frame.layer is None else f"layer {self.frame.layer}"
                note = f"an operator ({what}) inside of {name}, {_BY_HAND}"
                if note not in (notes := self.taps.injection.sites[tap.clause].notes):
                    notes.append(note)

    def note_fused(self, tensors: list[Any]) -> None:
        """Count an attention call whose inner products cannot be reached."""
        for tap in _hidden(self, tensors):
            if self.frame.current.acts_on(tap) and not self.frame.recomputing:
                self.taps.injection.sites[tap.clause].fused += 1


class Traced:
    """An operator of the graph that is being compiled. Dynamo traces it."""

    def __init__(self, taps: OperatorTaps, entry: Entry) -> None:
        self.taps, self.entry = taps, entry
        self.trace = custom_ops.traces[taps.injection.handle]

    def at(self, family: str, tensors: list[Any]) -> list[Tap]:
        """The taps of an operator that is given these."""
        entry, weights = self.entry, self.taps.weights
        excluded = entry.excluded or weights.traced_owner(tensors)
        if excluded is None and entry.is_root and weights.has_head and self._is_by_hand():
            excluded = "lm_head"
        return self.taps.tapped(family, entry.owner, entry.layer, excluded)

    def _is_by_hand(self) -> bool:
        """Whether this is inside of a hand-written autograd function: a product of the model itself is then its head's."""
        return self.trace.with_gradients and not torch.is_grad_enabled()

    def reaches(self, family: str, tensors: list[Any]) -> bool:
        """Whether an operator of this family is met here."""
        return len(self.at(family, tensors)) > 0

    def number(self, family: str) -> int:
        """How many operators of this family there were before in this layer and pass."""
        return self.trace.count(f"{self.entry.layer} {family}")

    def forward(self, tap: Tap, x: Tensor) -> Tensor:
        """The faulty result."""
        return custom_ops.trace_forward(x, tap.handle)

    def gradient(self, tap: Tap, x: Tensor, argument: int, number: int) -> Tensor:
        """An argument whose gradient will be faulty."""
        return custom_ops.trace_gradient(x, tap.handle, argument, number, False)

    def note_by_hand(self, taps: list[Tap]) -> None:
        """Name an operator inside of a hand-written autograd function."""
        if self._is_by_hand() and len(taps) > 0:
            what = "lm_head" if self.entry.layer is None else f"layer {self.entry.layer}"
            custom_ops.note(self.taps.injection.handle, f"an operator ({what}) inside of {_BY_HAND}")

    def note_fused(self, tensors: list[Any]) -> None:
        """Count an attention call whose inner products cannot be reached, whenever the graph runs."""
        for tap in _hidden(self, tensors):
            ticket = self.trace.ticket(tensors[0])
            torch.ops.shaketable.note_fused(self.taps.notes, ticket, tap.handle)


def _hidden(where: Here | Traced, tensors: list[Any]) -> list[Tap]:
    """The taps of what attention hides, one for each clause."""
    products = where.at("matmul", tensors)
    clauses = [tap.clause for tap in products]
    return products + [tap for tap in where.at("softmax", tensors) if tap.clause not in clauses]


class ExcludedWeights:
    """Weights of the modules that operator plans leave out: a head, a router, an adapter.

    What a weight belongs to decides, not which module is running: trainers multiply by the weight of a head outside of its
    module. A weight is known by its memory, which its views and transposes share.
    """

    def __init__(self) -> None:
        self._modules: dict[int, list[tuple[nn.Module, str]]] = {}
        self._heads: list[nn.Linear | nn.Embedding] = []
        self._known: dict[int, str] = {}
        self._cast: tuple[Tensor, int, str] | None = None
        """The last one that was cast, held so that nothing else gets its memory."""
        self._firsts: tuple[int, ...] = ()

    def add(self, module: nn.Module, reason: str, owner: int) -> None:
        """A module that is left out, of the model with this number."""
        self._modules.setdefault(owner, []).append((module, reason))
        self._firsts = ()
        if reason == "lm_head" and isinstance(module, nn.Linear | nn.Embedding):
            self._heads.append(module)

    def refresh(self) -> None:
        """A pass begins: weights may be where they were not before. A model moves as a whole, so its first one tells."""
        self._cast = None
        found = (next(self._weights(owner), None) for owner in self._modules)
        firsts = tuple(_address(first[0]) for first in found if first is not None)
        if firsts != self._firsts:
            self._firsts = firsts
            self._known = {_address(p): why for owner in self._modules for p, why in self._weights(owner)}

    def _weights(self, owner: int) -> Iterator[tuple[Tensor, str]]:
        modules = self._modules[owner]
        return ((p, why) for module, why in modules for p in module.parameters(recurse=False) if type(p) in _PLAIN)

    def owner(self, tensors: list[Any]) -> str | None:
        """Why an operator that is given these is left out; None when it is not."""
        if not self._known:
            return None
        for x in tensors:
            if type(x) in _PLAIN:
                address = _address(x)
                if (found := self._known.get(address)) is not None:
                    return found
                if self._cast is not None and self._cast[1] == address:
                    return self._cast[2]
        return None

    def cast(self, x: Any, result: Any) -> Any:
        """What was cast: of a weight that is left out it is left out too."""
        if self._known and type(x) in _PLAIN and type(result) is Tensor and (why := self.owner([x])) is not None:
            self._cast = result, _address(result), why
        return result

    @property
    def has_head(self) -> bool:
        """Whether there is a head among them."""
        return len(self._heads) > 0

    def traced_owner(self, tensors: list[Any]) -> str | None:
        """The same while a graph is traced, where memory has no address: a head is known as the object that it is."""
        for module in self._heads:
            for x in tensors:
                if x is module.weight:
                    return "lm_head"
        return None


def _function_by_hand() -> str | None:
    """The autograd function whose forward is running; None where there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return type(frame.f_locals["ctx"]).__name__.removesuffix("Backward")
        frame = frame.f_back
    return None


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


_PLAIN = (Tensor, nn.Parameter)
_BY_HAND = "a hand-written autograd function: what its backward computes is not covered"


def families(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operator families a site names."""
    return OPS if "all" in names else names

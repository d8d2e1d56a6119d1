"""Operator sites: every covered operator, forward and backward, in the layer that called it.

A TorchFunctionMode (`Operators`) sees each operator where Python calls it: `@`, torch.matmul, F.linear, einsum and the rest. It
puts a faulty gradient on each input that wants one and a fault on the result. Dynamo traces such modes, so the same code serves
torch.compile (`Here` in eager code, `Traced` in a graph).

The taps of an operator follow from its family, from the model and the layer that call it, and from the weight it multiplies
with: heads, routers and adapters are left out unless the plan includes them (`ExcludedWeights`).

An RMSNorm or GELU written out in Python is no operator to torch: its module is taken as one (`OperatorModule`). Fused attention
hides two products and a softmax: the ledger counts the call as fused, and a line says so (`hidden_by_attention`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shaketable.inject import op
from shaketable.inject.modules import Hook, change_first, change_input, never_compiled_alone
from shaketable.plan import OPS, Site
from shaketable.sites.composite_functions import opened
from shaketable.sites.engine_modules import is_engine_experts, is_engine_linear, is_engine_module
from shaketable.sites.structure import Part

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.op import Tap
    from shaketable.inject.passes import Entry, Frame


# ---- which taps an operator has


class OperatorTaps:
    """The operator clauses of one injection, as taps."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.loose: Entry | None = None
        """The entry for operators outside of all models; None where those are not covered."""
        self.weights = ExcludedWeights()
        self.notes = torch.zeros(1, dtype=torch.int64)
        """Mutated by the operator that counts fused attention, so that compilers keep it."""
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
        return self._taps.get((owner, layer, family, excluded), [])


class Here:
    """An operator that is called in a frame."""

    def __init__(self, taps: OperatorTaps, frame: Frame) -> None:
        self.taps, self.frame = taps, frame

    def at(self, family: str, tensors: list[Any]) -> list[Tap]:
        """The taps of an operator that is given these."""
        frame = self.frame
        excluded = frame.excluded or self.taps.weights.owner(tensors)
        return self.taps.tapped(family, frame.entry.owner, frame.layer, excluded)

    def number(self, family: str) -> int:
        """How many operators of this family there were before in this layer and pass."""
        return self.frame.count((self.frame.layer, family))

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

    frame = None

    def __init__(self, taps: OperatorTaps, entry: Entry) -> None:
        self.taps, self.entry = taps, entry
        self.trace = op.traces[taps.injection.handle]

    def at(self, family: str, tensors: list[Any]) -> list[Tap]:
        """The taps of an operator that is given these."""
        entry, weights = self.entry, self.taps.weights
        excluded = entry.excluded or ("lm_head" if weights.is_traced_head(tensors, self.trace.casts) else None)
        if excluded is None and entry.is_root and weights.heads and self._is_by_hand():
            excluded = "lm_head"
        return self.taps.tapped(family, entry.owner, entry.layer, excluded)

    def _is_by_hand(self) -> bool:
        """Whether this is inside of a hand-written autograd function: a product of the model itself is then its head's."""
        return self.trace.with_gradients and not torch.is_grad_enabled()

    def number(self, family: str) -> int:
        """How many operators of this family there were before in this layer and pass."""
        return self.trace.count(f"{self.entry.layer} {family}")

    def note_by_hand(self, taps: list[Tap]) -> None:
        """Name an operator inside of a hand-written autograd function."""
        if self._is_by_hand() and len(taps) > 0:
            what = "lm_head" if self.entry.layer is None else f"layer {self.entry.layer}"
            op.note(self.taps.injection.handle, f"an operator ({what}) inside of {_BY_HAND}")

    def note_fused(self, tensors: list[Any]) -> None:
        """Count an attention call whose inner products cannot be reached, whenever the graph runs."""
        for tap in _hidden(self, tensors):
            packed = self.trace.packed(tensors[0])
            torch.ops.shaketable.note_fused(self.taps.notes, packed, tap.handle)


def _hidden(where: Here | Traced, tensors: list[Any]) -> list[Tap]:
    """The taps of what attention hides, one for each clause."""
    products = where.at("matmul", tensors)
    clauses = [tap.clause for tap in products]
    return products + [tap for tap in where.at("softmax", tensors) if tap.clause not in clauses]


class ExcludedWeights:
    """Weights of the modules that operator plans leave out: a head, a router, an adapter.

    What a weight belongs to decides, not which module is running: trainers multiply by the weight of a head outside of its
    module. A weight is known by its memory, in which its views and transposes begin: one storage may hold many weights, as
    flat buffers of optimizers do.
    """

    def __init__(self) -> None:
        self._modules: dict[int, list[tuple[nn.Module, str]]] = {}
        self.heads: list[nn.Linear | nn.Embedding] = []
        self._known: dict[int, list[tuple[int, int, str]]] = {}
        """By storage: where weights begin and end in it, and why they are left out."""
        self._cast: tuple[Tensor, int, str] | None = None
        """The last one that was cast, held so that nothing else gets its memory."""
        self._firsts: tuple[int, ...] = ()

    def add(self, module: nn.Module, reason: str, owner: int) -> None:
        """A module that is left out, of the model with this number."""
        self._modules.setdefault(owner, []).append((module, reason))
        self._firsts = ()
        if reason == "lm_head" and isinstance(module, nn.Linear | nn.Embedding):
            self.heads.append(module)

    def refresh(self) -> None:
        """A pass begins: weights may be where they were not before. A model moves as a whole; heads are replaced alone."""
        self._cast = None
        found = (next(self._weights(owner), None) for owner in self._modules)
        heads = (module.weight for module in self.heads if type(module.weight) in _PLAIN)
        firsts = *(first[0].data_ptr() for first in found if first is not None), *(head.data_ptr() for head in heads)
        if firsts != self._firsts:
            self._firsts = firsts
            self._known = {}
            for p, why in (found for owner in self._modules for found in self._weights(owner)):
                self._known.setdefault(_storage(p), []).append((p.data_ptr(), p.data_ptr() + p.nbytes, why))

    def _weights(self, owner: int) -> Iterator[tuple[Tensor, str]]:
        modules = self._modules[owner]
        return ((p, why) for module, why in modules for p in module.parameters(recurse=False) if type(p) in _PLAIN)

    def owner(self, tensors: list[Any]) -> str | None:
        """Why an operator that is given these is left out; None when it is not."""
        if not self._known:
            return None
        for x in tensors:
            if type(x) in _PLAIN:
                storage = _storage(x)
                for start, end, why in self._known.get(storage, ()):
                    if start <= x.data_ptr() < end:
                        return why
                if self._cast is not None and self._cast[1] == storage:
                    return self._cast[2]
        return None

    def cast(self, x: Any, result: Any) -> Any:
        """What was cast: of a weight that is left out it is left out too."""
        if self._known and type(x) in _PLAIN and type(result) is Tensor and (why := self.owner([x])) is not None:
            self._cast = result, _storage(result), why
        return result

    def is_traced_head(self, tensors: list[Any], casts: list[Tensor]) -> bool:
        """Whether one of these is a head's weight, a view or a cast of it. Traced tensors have no address."""
        heads = [module.weight for module in self.heads] + casts
        for x in tensors:
            if isinstance(x, Tensor):
                for head in heads:
                    if x is head or x._base is head:
                        return True
        return False


def _function_by_hand() -> str | None:
    """The autograd function whose forward is running; None where there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return type(frame.f_locals["ctx"]).__name__.removesuffix("Backward")
        frame = frame.f_back
    return None


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


_PLAIN = (Tensor, nn.Parameter)
_BY_HAND = "a hand-written autograd function: what its backward computes is not covered"


def families(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operator families a site names."""
    return OPS if "all" in names else names


# ---- attention


OPEN = ("eager", "eager_paged")
"""Implementations of transformers that call one operator after the other."""
_HIDDEN = {"matmul": "two matrix products (op.matmul)", "softmax": "softmax (op.softmax)"}


def hidden_by_attention(model: nn.Module, site: Site) -> list[str]:
    """One line for each implementation of attention in a model that hides operators which a site names."""
    covered = families(site.names) if site.level == "op" else ()
    what = " and ".join(words for family, words in _HIDDEN.items() if family in covered)
    if not what:
        return []
    names = set()
    for module in model.modules():
        if "attention" in type(module).__name__.lower():
            name = "" if is_engine_module(module) else getattr(getattr(module, "config", None), "_attn_implementation", None)
            if name is not None and name not in OPEN:
                names.add(name)
    kernel = "attention is one kernel ({}), inside of which its {} cannot be hit; {}"
    advice = "load the model with attn_implementation=eager", "op.sdpa hits what it returns"
    return [kernel.format(name or "of the engine", what, advice[not name]) for name in sorted(names)]


# ---- the mode

_NAMES = {
    "matmul": (
        "mm addmm bmm baddbmm addbmm matmul __matmul__ __rmatmul__ linear einsum mv addmv inner tensordot multi_dot "
        "chain_matmul bilinear grouped_mm _grouped_mm grouped_mm_fallback addmm_ baddbmm_ addbmm_ addmv_"
    ),
    "softmax": "softmax _softmax",
    "silu": "silu",
    "gelu": "gelu",
    "layer_norm": "layer_norm native_layer_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "sdpa": "scaled_dot_product_attention",
}
_FAMILY = {name: family for family, names in _NAMES.items() for name in names.split()}
_WHOLE = ("", "multi_head_attention_forward")
"""Not an operator: a function that is opened, so that those inside are hit."""
_CAST = ("", "to")
"""Not an operator either: what is cast of the weight of a head is still the head's."""
_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as)
_IN_PLACE = {f"{name}_": getattr(torch, name) for name in ("addmm", "baddbmm", "addbmm", "addmv")}
"""What an operator in place computes, elsewhere."""


def _covered() -> dict[Any, tuple[str, str]]:
    """Every Python-visible function of a covered operator, with its family and name.

    `torch.ops.aten.mm` is covered, its overloads (`.default`) are not: those are what compiled graphs run, after their
    operators have been met in the graph itself.
    """
    homes = (torch, torch.Tensor, F, torch.linalg, torch._C._nn, torch.special)
    table: dict[Any, tuple[str, str]] = {}
    for name, family in _FAMILY.items():
        for home in homes:
            if (func := getattr(home, name, None)) is not None:
                table[func] = (family, name)
        if not name.startswith("__") and hasattr(torch.ops.aten, name):
            packet = getattr(torch.ops.aten, name)
            table[packet] = (family, name)
    return table | {F.multi_head_attention_forward: _WHOLE} | dict.fromkeys(_CASTS, _CAST)


COVERED = _covered()


def cover_transformers() -> None:
    """Add the grouped product of transformers' own experts, once transformers has defined it."""
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        packet = torch.ops.transformers.grouped_mm_fallback
        COVERED[packet] = ("matmul", "grouped_mm_fallback")


def atomic_family(part: Part) -> str | None:
    """The operator that a leaf module is as a whole, when it may be written out in Python. One that works in place is none:
    what it was given would stay clean. torch's own call a function, which is met."""
    if is_engine_linear(part.module) or is_engine_experts(part.module):
        return "matmul"
    if any(part.module.children()) or getattr(part.module, "inplace", False):
        return None
    kind = type(part.module).__name__.lower()
    if is_engine_module(part.module) and kind == "attention":
        return "sdpa"
    if part.role == "rmsnorm":
        return "rms_norm"
    return next((family for family in ("gelu", "silu") if family in kind), None)


class OperatorModule(Hook):
    """A module taken as one operator: faulty gradients of its input and weight, and a faulty output."""

    def __init__(self, injection: Injection, taps: list[Tap]) -> None:
        self.injection = injection
        self.handle = injection.handle
        self.backward = [tap for tap in taps if "backward" in tap.site.directions]
        self.forward = [tap for tap in taps if "forward" in tap.site.directions]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """Forward pre-hook and forward hook."""
        is_traced = torch.compiler.is_compiling()
        if is_traced and not op.present[self.handle]:
            return None
        frame = None if is_traced else self.injection.operator_frame()
        if not is_traced and (frame is None or not any(frame.current.acts_on(tap) for tap in (*self.backward, *self.forward))):
            return None
        if output:
            return change_first(output[0], lambda x: self._on_output(x, frame))[0]
        args, kwargs, _ = change_input(args, kwargs, lambda x: self._on_input(x, frame))
        return args, kwargs

    def _on_input(self, x: Tensor, frame: Frame | None) -> Tensor:
        for tap in self.backward:
            x = tap.gradient(x, frame)
        return x

    def _on_output(self, x: Tensor, frame: Frame | None) -> Tensor:
        for tap in self.forward:
            x = tap.forward(x, frame)
        return x


class Operators(TorchFunctionMode):
    """The operator clauses of one injection, active in one thread."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.injection = injection
        self.taps = injection.operators

    def put_on(self) -> bool:
        """Put our mode on in this thread, unless it is on; returns whether it was off.

        The stack itself is asked: `loss.backward()` runs through our mode and so runs with it off, and a recomputed
        layer inside it must switch it on again.
        """
        if self in torch.overrides._get_current_function_mode_stack():
            return False
        self.__enter__()
        return True

    def take_off(self) -> None:
        """Take our mode off in this thread, and those of plans that other threads have closed."""
        modes = torch.overrides._get_current_function_mode_stack()
        kept = [mode for mode in modes if mode is not self and not (isinstance(mode, Operators) and mode.injection.closed)]
        for _ in modes if len(kept) < len(modes) else ():
            torch.overrides._pop_mode()
        for mode in kept if len(kept) < len(modes) else ():
            torch.overrides._push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Most functions that pass here are not covered: those go first."""
        operator = COVERED.get(func)
        if operator is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if operator == _CAST:  # dynamo makes tuples anew: they are equal, not identical
            return self._cast(args[0], func(*args, **kwargs))
        where = self._where(operator[0], kwargs)
        if where is None:
            return func(*args, **kwargs)
        if operator == _WHOLE:
            with self:
                return opened(F.multi_head_attention_forward)(*args, **kwargs)
        return self._meet(where, func, operator, args, kwargs)

    def _cast(self, x: Any, result: Any) -> Any:
        """The result of a cast, remembered where it is a head's weight in another type."""
        if not torch.compiler.is_compiling():
            return self.taps.weights.cast(x, result)
        trace = op.traces[self.injection.handle]
        by_hand = trace.with_gradients and not torch.is_grad_enabled()  # dynamo lets no tensor out of such a function
        if op.present[self.injection.handle] and not by_hand and self.taps.weights.is_traced_head([x], trace.casts):
            trace.casts.append(result)
        return result

    def _where(self, family: str, kwargs: dict[str, Any]) -> Here | Traced | None:
        """Where an operator is hit: in a frame, or in the graph that is being traced; None where it is not covered."""
        injection = self.injection
        if torch.compiler.is_compiling():
            entries = op.traces[injection.handle].entries
            entry = entries[-1] if entries else self.taps.loose
            if entry is None or entry.atomic == family or not op.present[injection.handle]:
                return None
            return Traced(self.taps, entry)
        if torch._guards.TracingContext.try_get() is not None:  # fake tensors of a graph that dynamo has traced already
            return None
        caller = sys._getframe(2)
        if _is_dynamos(caller) or ("out" in kwargs and _is_inductor(caller)):
            return None
        frame = injection.operator_frame()
        return None if frame is None or frame.entry.atomic == family else Here(self.taps, frame)

    def _meet(self, where: Here | Traced, func: Any, operator: tuple[str, str], args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator, with faults on its result and on the gradients of what it is given."""
        family, name = operator
        tensors = [*args, *kwargs.values()]
        taps = where.at(family, tensors)
        if family == "sdpa":
            where.note_fused(tensors)
        if not taps:
            return func(*args, **kwargs)
        where.note_by_hand(taps)
        func, args, kwargs, target = _elsewhere(func, name, args, kwargs)
        args, kwargs = _mark_gradients(where, taps, args, kwargs, where.number(family))
        result = _change_result(where, taps, func(*args, **kwargs))
        return result if target is None else target.copy_(result)


def _elsewhere(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any], Tensor | None]:
    """An operator that writes into a tensor it is given, as one that does not, and that tensor."""
    if name in _IN_PLACE:
        return _IN_PLACE[name], args, kwargs, args[0]
    if kwargs.get("out") is not None:
        return func, args, {key: value for key, value in kwargs.items() if key != "out"}, kwargs["out"]
    if name == "silu" and (kwargs.get("inplace") or True in args[1:]):
        return func, (args[0].clone(),), {}, args[0]
    return func, args, kwargs, None


def _mark_gradients(where: Here | Traced, taps: list[Tap], args: Any, kwargs: Any, number: int) -> tuple[Any, Any]:
    """The arguments, of which each tensor that wants a gradient gets a faulty one."""
    if not torch.is_grad_enabled():
        return args, kwargs
    taps = [tap for tap in taps if "backward" in tap.site.directions]
    position = 0
    changed: list[Any] = []
    for value in args:
        value, position = _mark(where, taps, value, position, number)
        changed.append(value)
    named = {}
    for key, value in kwargs.items():
        value, position = _mark(where, taps, value, position, number)
        named[key] = value
    return tuple(changed), named


def _mark(where: Here | Traced, taps: list[Tap], value: Any, position: int, number: int) -> tuple[Any, int]:
    """One argument, which may be a list of tensors, and the number of the last one that was looked at."""
    if isinstance(value, list | tuple):
        members = []
        for member in value:
            member, position = _mark(where, taps, member, position, number)
            members.append(member)
        return type(value)(members), position
    position += 1
    if isinstance(value, Tensor) and value.requires_grad:
        for tap in taps:
            value = tap.gradient(value, where.frame, position, number)
    return value, position


def _change_result(where: Here | Traced, taps: list[Tap], result: Any) -> Any:
    """Some norms return their statistics too: there the first result is hit."""
    for tap in taps:
        if "forward" in tap.site.directions:
            result = change_first(result, partial(tap.forward, frame=where.frame))[0]
    return result


never_compiled_alone(Operators.__torch_function__)


def _is_dynamos(caller: types.FrameType) -> bool:
    """Whether a call comes from a graph of dynamo's that is run as it is, as `backend="eager"` does: it was met in tracing."""
    if not caller.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    return "dynamo_flat_name_to_original_fqn" in getattr(caller.f_locals.get("self"), "meta", ())


def _is_inductor(caller: types.FrameType) -> bool:
    """Whether a call comes from a file that inductor wrote: its products were met when the graph was traced."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return inductor is not None and caller.f_code.co_filename.startswith(inductor.cache_dir())

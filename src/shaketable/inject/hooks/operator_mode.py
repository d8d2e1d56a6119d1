"""Operator sites: every covered operator, forward and backward, in the layer that called it.

A TorchFunctionMode meets each operator where Python calls it: `@`, torch.matmul, F.linear, einsum and the rest all pass
there, also when they were imported by name long ago. Around the real call it puts a `FaultyGradient` on the inputs that want a
gradient (every gradient the operator produces gets its own error) and a fault on the result. Dynamo traces such modes, so
the same code serves torch.compile: how the operator is placed differs (`Here`, `Traced`), what is done does not.
Monkey-patching torch.matmul and F.linear, as the study we come from did, misses `@`, mm, einsum, attention and every name that
was bound early.

Two operators need more. An RMSNorm or GELU written out in Python is no operator to torch: its module is taken as one
(`Entry.atomic`). Fused attention computes two matrix products and a softmax that no one can reach: where the math
backend alone is enabled they are computed one by one and met; elsewhere the ledger counts the call as fused.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shaketable.inject.compile import custom_ops
from shaketable.inject.hooks.base import Hook, never_compiled_alone
from shaketable.inject.hooks.math_attention import attention_in_the_open, only_math, open_multi_head
from shaketable.inject.hooks.module_tensors import change_first, change_input
from shaketable.inject.hooks.operator_taps import Here, Traced
from shaketable.sites.engine_modules import is_engine_experts, is_engine_linear, is_engine_module
from shaketable.sites.structure import Part

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Frame
    from shaketable.inject.tap import Tap

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
"""Not an operator: a function that is opened, so that those inside are met."""
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
    """The operator that a leaf module is as a whole, when it may be written out in Python."""
    if is_engine_linear(part.module) or is_engine_experts(part.module):
        return "matmul"
    if any(part.module.children()):
        return None
    kind = type(part.module).__name__.lower()
    if is_engine_module(part.module) and kind == "attention":
        return "sdpa"
    if part.role == "rmsnorm":
        return "rms_norm"
    return next((family for family in ("gelu", "silu") if family in kind), None)


class OperatorModule(Hook):
    """A module taken as one operator: faulty gradients of its input and weight, and a faulty output.

    A module that works in place gets a copy while a tap acts; the result is then written into the tensor it was given.
    """

    def __init__(self, injection: Injection, taps: list[Tap]) -> None:
        self.injection = injection
        self.handle = injection.handle
        self.backward = [tap for tap in taps if "backward" in tap.site.directions]
        self.forward = [tap for tap in taps if "forward" in tap.site.directions]
        self.local = threading.local()
        self.traced: list[Tensor | None] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """Forward pre-hook and forward hook."""
        is_traced = torch.compiler.is_compiling()
        if is_traced and not custom_ops.present[self.handle]:
            return None
        frame = None if is_traced else self.injection.operator_frame()
        if not is_traced and (frame is None or not any(frame.current.acts_on(tap) for tap in (*self.backward, *self.forward))):
            return None
        targets = self.traced if is_traced else self.local.__dict__.setdefault("targets", [])
        if not getattr(module, "inplace", False):
            if output:
                return change_first(output[0], lambda x: self._on_output(x, frame))[0]
            args, kwargs, _ = change_input(args, kwargs, lambda x: self._on_input(x, frame))
            return args, kwargs
        if output:
            target = targets.pop() if targets else None
            changed = change_first(output[0], lambda x: self._on_output(x, frame))[0]
            return changed if target is None else target.copy_(changed)

        def copied(x: Tensor) -> Tensor:
            targets.append(x)
            return self._on_input(x, frame).clone()

        args, kwargs, _ = change_input(args, kwargs, copied)
        return args, kwargs

    def _on_input(self, x: Tensor, frame: Frame | None) -> Tensor:
        for tap in self.backward:
            x = custom_ops.trace_gradient(x, tap.handle, 0, None, False) if frame is None else tap.gradient(x, frame)
        return x

    def _on_output(self, x: Tensor, frame: Frame | None) -> Tensor:
        for tap in self.forward:
            x = custom_ops.trace_forward(x, tap.handle) if frame is None else tap.forward(x, frame)
        return x


class Operators(TorchFunctionMode):
    """The operator clauses of one injection, active in one thread."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.injection = injection
        self.taps = injection.operators

    def put_on(self) -> bool:
        """Put our mode on in this thread, unless it is on; whether it was not.

        The stack itself is asked: `loss.backward()` runs through our mode and so runs with it off, and a recomputed
        layer inside it must switch it on again.
        """
        if self in torch.overrides._get_current_function_mode_stack():
            return False
        self.__enter__()
        return True

    def take_off(self) -> None:
        """Take our mode off in this thread, wherever in the stack it is."""
        _take_off(lambda mode: mode is self)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Thousands of functions pass here that are nobody's business: those go first."""
        operator = COVERED.get(func)
        if operator is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if operator is _CAST:
            return self.taps.weights.cast(args[0], func(*args, **kwargs))
        where = self._where(operator[0], kwargs)
        if where is None:
            return func(*args, **kwargs)
        if operator is _WHOLE:
            with self:
                return open_multi_head()(*args, **kwargs)
        return self._meet(where, func, operator, args, kwargs)

    def _where(self, family: str, kwargs: dict[str, Any]) -> Here | Traced | None:
        """Where an operator is met: in a frame, or in the graph that is being traced; None where it is nobody's business."""
        injection = self.injection
        if torch.compiler.is_compiling():
            entry = self.taps.tracing_entry() if custom_ops.present[injection.handle] else None
            return None if entry is None or entry.atomic == family else Traced(self.taps, entry)
        caller = sys._getframe(2)
        if _is_tracing() or _is_dynamos(caller) or ("out" in kwargs and _is_inductor(caller)):
            return None
        frame = injection.operator_frame()
        return None if frame is None or frame.entry.atomic == family else Here(self.taps, frame)

    def _meet(self, where: Here | Traced, func: Any, operator: tuple[str, str], args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator, with faults on its result and on the gradients of what it is given."""
        family, name = operator
        tensors = [*args, *kwargs.values()]
        taps = where.at(family, tensors)
        if family == "sdpa" and (where.reaches("matmul", tensors) or where.reaches("softmax", tensors)):
            if only_math():
                with self:
                    result = attention_in_the_open(*args, **kwargs)
                return _change_result(where, taps, result)
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
            value = where.gradient(tap, value, position, number)
    return value, position


def _change_result(where: Here | Traced, taps: list[Tap], result: Any) -> Any:
    """Some norms return their statistics too: there the first result is hit."""
    for tap in taps:
        if "forward" in tap.site.directions:
            result = change_first(result, partial(where.forward, tap))[0]
    return result


never_compiled_alone(Operators.__torch_function__)


def take_off_closed() -> None:
    """Take the modes off in this thread whose injections another thread has closed: a thread cannot reach another's stack."""
    _take_off(lambda mode: isinstance(mode, Operators) and mode.injection.closed)


def _take_off(unwanted: Callable[[Any], bool]) -> None:
    modes = torch.overrides._get_current_function_mode_stack()
    lowest = next((i for i, mode in enumerate(modes) if unwanted(mode)), len(modes))
    for _ in modes[lowest:]:
        torch.overrides._pop_mode()
    for mode in modes[lowest:]:
        if not unwanted(mode):
            torch.overrides._push_mode(mode)


def _is_tracing() -> bool:
    """Whether a graph is being made of what dynamo has already traced: those calls are on fake tensors."""
    return torch._guards.TracingContext.try_get() is not None


def _is_dynamos(caller: types.FrameType) -> bool:
    """Whether a call comes from a graph of dynamo's that is run as it is, as `backend="eager"` does: it was met in tracing."""
    if not caller.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    return "dynamo_flat_name_to_original_fqn" in getattr(caller.f_locals.get("self"), "meta", ())


def _is_inductor(caller: types.FrameType) -> bool:
    """Whether a call comes from a file that inductor wrote: its products were met when the graph was traced."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return inductor is not None and caller.f_code.co_filename.startswith(inductor.cache_dir())

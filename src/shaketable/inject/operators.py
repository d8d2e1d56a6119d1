"""Operator sites: every covered operator, forward and backward, in the layer that called it.

A TorchFunctionMode meets each operator where Python calls it: `@`, torch.matmul, F.linear, einsum and the rest all pass
there, also when they were imported by name long ago. Around the real call it puts `Echo`es on the inputs that want a
gradient (every gradient the operator produces gets its own error) and strikes the result. Dynamo traces such modes, so
the same code serves torch.compile. Monkey-patching torch.matmul and F.linear, as the study we come from did, misses
`@`, mm, einsum, attention and every name that was bound early.

Two operators need more. An RMSNorm or GELU written out in Python is no operator to torch: its module is taken as one
(`Entry.atomic`). Fused attention computes two matrix products and a softmax that no one can reach: where the math
backend alone is enabled they are computed one by one and struck; elsewhere the ledger counts the call as fused.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shaketable.inject.hooks import Hook
from shaketable.inject.open_attention import attention_in_the_open, only_math, open_multi_head
from shaketable.inject.short.products import Products
from shaketable.inject.tensors import change_first, change_input
from shaketable.inject.traced import compiled
from shaketable.sites.anatomy import Part
from shaketable.sites.engines import is_engine_experts, is_engine_linear, is_engine_module

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.taps import Tap

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
_IN_PLACE = {"addmm_", "baddbmm_", "addbmm_", "addmv_"}


def _covered() -> dict[Any, tuple[str, str]]:
    """Every Python-visible function of a covered operator, with its family and name.

    `torch.ops.aten.mm` is covered, its overloads (`.default`) are not: those are what compiled graphs run, after their
    operators have been struck in the graph itself.
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
    return table | {F.multi_head_attention_forward: _WHOLE}


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
    """A module taken as one operator: echoes on its input and weight, strikes on its output."""

    def __init__(self, injection: Injection, taps: list[Tap]) -> None:
        self.injection = injection
        self.handle = injection.handle
        self.echoes = [tap for tap in taps if "backward" in tap.site.directions]
        self.strikes = [tap for tap in taps if "forward" in tap.site.directions]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """Forward pre-hook and forward hook."""
        if torch.compiler.is_compiling() and not compiled.present[self.handle]:
            return None
        if output:
            return change_first(output[0], self._strike)[0]
        args, kwargs, _ = change_input(args, kwargs, self._echo)
        return args, kwargs

    def _echo(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            for tap in self.echoes:
                x = compiled.TracedEcho.apply(x, tap.handle, 0, False)
            return x
        frame = self.injection.calls.top()
        for tap in self.echoes:
            x = x if frame is None else tap.echo(x, frame)
        return x

    def _strike(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            for tap in self.strikes:
                x = compiled.trace_forward(x, tap.handle)
            return x
        frame = self.injection.calls.top()
        return x if frame is None else _strike_all(self.strikes, x, frame)


class Operators(TorchFunctionMode):
    """The operator clauses of one injection, active in one thread."""

    is_ours = True

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.injection = injection
        self.products = Products(injection)
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
        if self not in torch.overrides._get_current_function_mode_stack():
            return
        above = []
        while (top := torch.overrides._pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Thousands of functions pass here that are nobody's business: those go first."""
        operator = COVERED.get(func)
        if operator is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        is_traced = torch.compiler.is_compiling()
        if operator is _WHOLE and not (is_traced and not compiled.present[self.injection.handle]):
            with self:
                return open_multi_head()(*args, **kwargs)
        if is_traced:
            return self._traced(func, operator, args, kwargs)
        if func is F.linear and not kwargs:
            result = self.products.linear(func, args)
            if result is not None:
                return result
        return self._eager(func, operator, args, kwargs)

    def _traced(self, func: Any, operator: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taps = self.taps.traced(operator[0])
        if not taps or not compiled.present[self.injection.handle]:
            return func(*args, **kwargs)
        echoes = [tap.handle for tap in taps if "backward" in tap.site.directions]
        strikes = [tap.handle for tap in taps if "forward" in tap.site.directions]
        position = 0
        changed = []
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                for handle in echoes:
                    value = compiled.TracedEcho.apply(value, handle, position, False)
            position += 1
            changed.append(value)
        named = {}
        for key, value in kwargs.items():
            if isinstance(value, Tensor) and value.requires_grad:
                for handle in echoes:
                    value = compiled.TracedEcho.apply(value, handle, position, False)
            position += 1
            named[key] = value
        result = func(*changed, **named)
        for handle in strikes:
            result = compiled.trace_forward(result, handle)
        return result

    def _eager(self, func: Any, operator: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        family, name = operator
        compiled_code = _is_tracing() or ("out" in kwargs and _is_inductor(sys._getframe(2)))
        frame = self.injection.operator_frame() if self.injection.enabled and not compiled_code else None
        if frame is None or frame.entry.atomic == family:
            return func(*args, **kwargs)
        taps = self.taps.at(family, frame)
        if family == "sdpa" and (self.taps.reach("matmul", frame) or self.taps.reach("softmax", frame)):
            if only_math():
                with self:
                    result = attention_in_the_open(*args, **kwargs)
                return _strike_all(taps, result, frame)
            self.taps.note_fused(frame)
        if not taps:
            return func(*args, **kwargs)
        args, kwargs = _echo_all(taps, args, kwargs, frame, frame.count((frame.layer, family)))
        result = func(*args, **kwargs)
        if name in _IN_PLACE or kwargs.get("out") is not None:
            return result.copy_(_strike_all(taps, result.clone(), frame))
        return _strike_all(taps, result, frame)


def _echo_all(taps: list[Tap], args: Any, kwargs: Any, frame: Any, number: int) -> tuple[Any, Any]:
    """The arguments, with an echo on every tensor that wants a gradient."""
    position = 0

    def echo(value: Any) -> Any:
        nonlocal position
        if isinstance(value, list | tuple):
            return type(value)([echo(v) for v in value])
        position += 1
        if isinstance(value, Tensor) and value.requires_grad:
            for tap in taps:
                if "backward" in tap.site.directions:
                    value = tap.echo(value, frame, position, number)
        return value

    if not torch.is_grad_enabled():
        return args, kwargs
    return tuple(echo(a) for a in args), {k: v if k == "out" else echo(v) for k, v in kwargs.items()}


def _strike_all(taps: list[Tap], result: Tensor, frame: Any) -> Tensor:
    for tap in taps:
        if "forward" in tap.site.directions:
            result = tap.forward(result, frame)
    return result


def _is_tracing() -> bool:
    """Whether a graph is being made of what dynamo has already traced: those calls are on fake tensors."""
    return torch._guards.TracingContext.try_get() is not None


def _is_inductor(caller: types.FrameType) -> bool:
    """Whether a call comes from a file that inductor wrote: its products were struck when the graph was traced."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return inductor is not None and caller.f_code.co_filename.startswith(inductor.cache_dir())

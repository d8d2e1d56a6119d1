"""Module and layer sites: forward hooks that hand one tensor to the taps of a module, in the order of the plan.

`Hook` is the base of everything that we register on a module. In copies and pickles of a model our hooks do nothing.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.errors import PlanError
from shaketable.inject import op
from shaketable.inject.op import Tap
from shaketable.inject.passes import Entry, Frame
from shaketable.sites.engine_modules import is_engine_module

# ---- hooks

_plans = 0
"""How many plans are on models."""
_skips_hook_guards = True
"""What dynamo's config says while no plan is on a model."""


def begin_plan() -> None:
    """A plan is put on a model: have dynamo guard graphs by the hooks of their modules.

    It leaves that guard out, and would run the graph of a clean model for a faulty one of the same class.
    """
    from torch._dynamo import config

    global _plans, _skips_hook_guards
    if not _plans:
        _skips_hook_guards = config.skip_nnmodule_hook_guards
        config.skip_nnmodule_hook_guards = False
    _plans += 1


def end_plan() -> None:
    """It is taken off; with the last one dynamo has its own guards back."""
    from torch._dynamo import config

    global _plans
    _plans -= 1
    if not _plans:
        config.skip_nnmodule_hook_guards = _skips_hook_guards


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a hook in a copy."""


class Hook:
    """Base of everything that is registered on a module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return do_nothing

    def __reduce__(self) -> Any:
        return _left_behind, ()


def _left_behind() -> Any:
    return do_nothing


def never_compiled_alone(function: Any) -> None:
    """Have dynamo trace a function inside of what it compiles, and never compile it by itself.

    After a graph break in a loop it does, and torch 2.13 does not guard which function a torch function mode was called for:
    the code compiled for one is run for another (`x.square().mean()` becomes `x.square().square()`, with any mode).
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


# ---- the tensor a module is about


def change_first(value: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """`value` with its first tensor changed, and whether there was one.

    A tuple's other members stay as they are: attention returns (output, weights), decoder layers (hidden states, cache).
    """
    if isinstance(value, Tensor):
        return change(value), True
    if isinstance(value, tuple | list):
        for i, member in enumerate(value):
            if isinstance(member, Tensor):
                return _rebuilt(value, i, change(member)), True
        return value, False
    if isinstance(value, Mapping):
        for key, member in value.items():
            if isinstance(member, Tensor):
                changed: Any = copy.copy(value)
                changed[key] = change(member)
                return changed, True
    return value, False


def is_product(module: nn.Module) -> bool:
    """Whether a module is a product of its input with its weight, which autocast casts."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def as_multiplied(x: Tensor) -> Tensor:
    """A tensor in the type that autocast will multiply it in: a fault on anything finer would be lost in the cast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _rebuilt(value: Any, index: int, member: Tensor) -> Any:
    members = list(value)
    members[index] = member
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*members)
    return type(value)(members)


def change_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments with the tensor the module is about changed.

    The first floating tensor: positional ones, then `hidden_states`, `input` or `x`, then other keywords. Where no
    tensor is floating the first of any type is handed over, so that whoever changes it can say that it will not do.
    """
    places: list[Any] = [*range(len(args)), *(k for k in _INPUTS if k in kwargs), *kwargs]
    tensors = [p for p in places if isinstance(args[p] if isinstance(p, int) else kwargs[p], Tensor)]
    floating = [p for p in tensors if (args[p] if isinstance(p, int) else kwargs[p]).is_floating_point()]
    if not tensors:
        return args, kwargs, False
    place = floating[0] if floating else tensors[0]
    if isinstance(place, int):
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs, True
    return args, {**kwargs, place: change(kwargs[place])}, True


_INPUTS = ("hidden_states", "input", "x")


# ---- module sites


class ModuleTaps(Hook):
    """The taps of one plan at one point of one module."""

    def __init__(self, point: str, taps: list[Tap], entry: Entry) -> None:
        self.point = point
        self.taps = taps
        self.injection = taps[0].injection
        self.entry = entry
        self.multiplies = point == "input" and is_product(entry.module)

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        if self.point == "input":
            return [module.register_forward_pre_hook(self, with_kwargs=True)]
        return [module.register_forward_hook(self, with_kwargs=True)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        frame = None
        if torch.compiler.is_compiling():
            if not op.is_present(self.taps[0].handle):
                return None
        else:
            frame = self.injection.frame(self.entry, args, kwargs)
            if frame is None:
                return None
        return self._on_output(frame, output[0]) if output else self._on_input(frame, args, kwargs)

    def _on_input(self, frame: Frame | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, found = change_input(args, kwargs, lambda x: self._touch(x, frame))
        if not found:
            raise PlanError(f"{self.taps[0].site.label}: {self.taps[0].name} was called without a tensor to change")
        return args, kwargs

    def _on_output(self, frame: Frame | None, output: Any) -> Any:
        output, found = change_first(output, lambda x: self._touch(x, frame))
        if not found:
            raise PlanError(f"{self.taps[0].site.label}: {self.taps[0].name} returned no tensor to change")
        return output

    def _touch(self, x: Tensor, frame: Frame | None) -> Tensor:
        """The tensor with the faults of all taps; without a frame, in a graph that is being traced."""
        if self.multiplies and (frame is None or any(frame.current.acts_on(tap) for tap in self.taps)):
            x = as_multiplied(x)
        for tap in self.taps:
            x = tap.touch(x, frame)
        return x


def hooks_for(module: nn.Module) -> type[ModuleTaps]:
    """The class of the hooks at the points of a module. Modules of vLLM may take and return a pair (hidden, residual)."""
    if not is_engine_module(module):
        return ModuleTaps
    pairs = importlib.import_module("shaketable.integrations.vllm.residual_pair")
    kind: type[ModuleTaps] = pairs.PairTaps if pairs.carries_pair(module) else ModuleTaps
    return kind

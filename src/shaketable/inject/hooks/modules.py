"""Module and layer sites: forward hooks that hand one tensor to the taps of that module, in the order of the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shaketable.errors import PlanError
from shaketable.inject.compile import custom_ops
from shaketable.inject.hooks.base import Hook
from shaketable.inject.hooks.module_tensors import as_multiplied, change_first, change_input, is_product
from shaketable.inject.pass_context import Entry, Frame
from shaketable.inject.tap import Tap


class ModuleTaps(Hook):
    """The taps of one plan at one point of one module."""

    def __init__(self, point: str, taps: list[Tap], entry: Entry) -> None:
        self.point = point
        self.taps = taps
        self.injection = taps[0].injection
        self.entry = entry
        self.multiplies = point == "input" and is_product(entry.module)

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook the module at this point."""
        if self.point == "input":
            return [module.register_forward_pre_hook(self, with_kwargs=True)]
        return [module.register_forward_hook(self, with_kwargs=True)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        """Forward pre-hook, or forward hook."""
        if torch.compiler.is_compiling():
            if not custom_ops.is_present(self.taps[0].handle):
                return None
        elif not self.injection.enabled:
            return None
        return self._on_output(args, kwargs, output[0]) if output else self._on_input(args, kwargs)

    def _on_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = self._frame(args, kwargs)
        args, kwargs, found = change_input(args, kwargs, lambda x: self._touch(x, frame))
        if not found:
            raise PlanError(f"{self.taps[0].site.label}: {self.taps[0].name} was called without a tensor to change")
        return args, kwargs

    def _on_output(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        frame = self._frame(args, kwargs)
        output, found = change_first(output, lambda x: self._touch(x, frame))
        if not found:
            raise PlanError(f"{self.taps[0].site.label}: {self.taps[0].name} returned no tensor to change")
        return output

    def _frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        if torch.compiler.is_compiling():
            return None
        return self.injection.frame(self.entry, args, kwargs)

    def _touch(self, x: Tensor, frame: Frame | None) -> Tensor:
        if self.multiplies and (frame is None or any(frame.current.acts_on(tap) for tap in self.taps)):
            x = as_multiplied(x)
        for tap in self.taps:
            x = custom_ops.trace(x, tap) if frame is None else tap.touch(x, frame)
        return x

"""Teacher forcing inside of a layer: every operator reads what the file says, and the file's result goes on in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.sites.nested_tensors import map_tensors, tensors_of


class Forcing:
    """Holds the operators of one call to the file, and keeps what they were given and made.

    Args:
        root: The layer.
        ops: Stored input and output of every operator, on its device.
    """

    def __init__(self, root: nn.Module, ops: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.root = root
        self.ops = ops
        self.arrived: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hook every operator: first in line on its input, last in line on its output."""
        paths = dict.fromkeys(label.partition("#")[0] for label in self.ops)
        hooks = []
        for path in paths:
            module = self.root.get_submodule(path)
            hooks.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(self._after(path)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _label(self, path: str) -> str:
        n = self._counts[path]
        return path if n == 1 else f"{path}#{n}"

    def _before(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._counts[path] = self._counts.get(path, 0) + 1
            label = self._label(path)
            if label not in self.ops:
                return None
            first = next(tensors_of((args, kwargs)))
            self.arrived[label] = first
            x = laid_out_like(self.ops[label][0].clone(), first)
            return map_tensors((args, kwargs), lambda t: x if t is first else t)

        return hook

    def _after(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            label = self._label(path)
            if label not in self.ops:
                return None
            self.made[label] = output
            return self.ops[label][1].clone()

        return hook


def laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """The same values with the strides of another tensor: a kernel may round otherwise on a slice than on a whole."""
    overlaps = any(step == 0 and size > 1 for step, size in zip(other.stride(), other.shape, strict=True))
    if x.shape != other.shape or x.stride() == other.stride() or overlaps:
        return x
    return torch.empty_strided(x.shape, other.stride(), dtype=x.dtype, device=x.device).copy_(x)

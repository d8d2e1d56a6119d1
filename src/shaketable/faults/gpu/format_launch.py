"""A format on tensors of one size, laid out: all that a launch still needs is where to read and where to write.

`coded` of `formats.py` cuts a shape into segments, builds a key and fills in eight arguments at every call: 40 microseconds of
Python, on each of 210 linears. Here that has been done once per size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shaketable.faults.gpu import dispatch
from shaketable.faults.gpu.formats import plan_of

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.gpu.launch import Launcher

_codings: dict[tuple[Any, ...], Coding] = {}
_ENOUGH = 1024
"""Sizes that are remembered."""


class Coding:
    """One format, rounding to even, from a contiguous tensor of one size and type into another."""

    def __init__(self, launcher: Launcher, programs: int, x: Tensor, sizes: tuple[int, int, int]) -> None:
        self.dtype, self.device = x.dtype, x.get_device()
        self.alone = torch.cuda.device_count() == 1
        self._launcher, self._programs, self._sizes = launcher, programs, sizes

    def __call__(self, source: int, target: int) -> None:
        """Launch on the current stream."""
        self._launcher(self._programs, self.device, (source, target, source, *self._sizes, 0, 0))


def coding(x: Tensor, kind: str, scope: str) -> Coding | None:
    """The launch for tensors like `x`, when a strike on one has gone the ordinary way before; None where there is none.

    Formats that first ask for the maximum of the whole tensor take more than one launch.
    """
    if scope == "tensor" or kind == "nvfp4" or not dispatch.fits(x):
        return None
    key = (kind, scope, x.numel(), x.shape[-1] if x.dim() else 1, x.dtype, x.device)
    if key not in _codings and (made := _coding(x, kind, scope)) is not None:
        if len(_codings) >= _ENOUGH:
            _codings.clear()
        _codings[key] = made
    return _codings.get(key)


def _coding(x: Tensor, kind: str, scope: str) -> Coding | None:
    kernel, parts, constants = plan_of(x, kind, scope, stochastic=False)
    constants = constants | {"FAST": not dispatch.interpreting()}
    launcher = dispatch.launcher(kernel, (x, x, x, *parts.sizes, 0, 0), constants, parts.warps)
    return None if launcher is None else Coding(launcher, parts.programs, x, parts.sizes)

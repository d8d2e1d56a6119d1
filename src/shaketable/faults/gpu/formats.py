"""Number formats on a GPU: which segments share a scale, and the launch; None where no kernel fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shaketable.faults.gpu import dispatch, reductions
from shaketable.faults.gpu.tiling import Segments, flat, launch, segments

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {"mxfp4": (0, 32), "nvfp4": (1, 16), "fp8_e4m3": (2, 128), "fp8_e5m2": (3, 128)}
"""What the kernel calls a format, and the length of its blocks."""
_SCOPES = {"none": 0, "tensor": 1, "token": 2, "block": 2}


def coded(x: Tensor, kind: str, scope: str, key: int | None) -> Tensor | None:
    """Quantize and dequantize in one pass, and one before it where the tensor's maximum is asked for.

    Args:
        x: What is quantized, along its last dimension.
        kind: The format, as a plan names it.
        scope: What shares one scale: tensor, token, block or none.
        key: `Draw.key` for stochastic rounding, None for rounding to even.
    """
    import torch

    if not dispatch.fits(x):
        return None
    kernel, parts, constants = plan_of(x, kind, scope, stochastic=key is not None)
    if parts.padded > dispatch.LARGEST:
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    whole = reductions.top(x, finite=False) if scope == "tensor" or kind == "nvfp4" else x
    launch(kernel, parts.programs, x, y, whole, *parts.sizes, *dispatch.words(key or 0), warps=parts.warps, **constants)
    return y


def plan_of(x: Tensor, kind: str, scope: str, *, stochastic: bool) -> tuple[Any, Segments, dict[str, Any]]:
    """The kernel, how it cuts tensors like `x`, and what it is compiled for."""
    from shaketable.faults.gpu.kernels.formats import quantize

    code, block = _KINDS[kind]
    parts = flat(x) if scope in ("none", "tensor") else segments(x, block if scope == "block" else None)
    return quantize, parts, {"KIND": code, "SCOPE": _SCOPES[scope], "STOCHASTIC": stochastic, **parts.shape}

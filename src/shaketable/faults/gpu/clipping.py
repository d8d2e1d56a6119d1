"""Clipping on a card: which segments share a maximum, and the launch; None where no kernel fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.gpu import dispatch, reductions
from shaketable.faults.gpu.tiling import flat, launch, segments

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {"dead_zone": 0, "saturation": 1}
_SCOPES = {"absolute": 0, "tensor": 1, "token": 2, "block": 2}


def clipped(x: Tensor, kind: str, magnitude: float, scope: str, block: int, g: Tensor | None = None) -> Tensor | None:
    """The clipped tensor, or with `g` the gradient that passes.

    Args:
        x: The clean tensor.
        kind: The fault, as a plan names it.
        magnitude: The fraction of the maximum, or the ceiling itself where the scope is `absolute`.
        scope: What the maximum is taken over.
        block: How many values that is where the scope is `block`.
        g: The gradient with respect to the clipped tensor.
    """
    import torch

    if not dispatch.fits(x) or not (g is None or (dispatch.fits(g) and g.shape == x.shape)):
        return None
    length = min(block, x.shape[-1]) if scope == "block" and x.dim() else None
    parts = flat(x) if scope in ("absolute", "tensor") else segments(x, length)
    if parts.padded > dispatch.LARGEST:
        return None
    from shaketable.faults.gpu.kernels.clipping import clip

    x = x.contiguous()
    back = x if g is None else g.contiguous()
    y = torch.empty_like(back)
    whole = reductions.top(x, finite=True) if scope == "tensor" else x
    how = {"KIND": _KINDS[kind], "SCOPE": _SCOPES[scope], "GRADIENT": g is not None, **parts.shape}
    launch(clip, parts.programs, x, back, y, whole, magnitude, *parts.sizes, warps=parts.warps, **how)
    return y

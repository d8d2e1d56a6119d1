"""A tensor's largest magnitude, mean, spread and size, as numbers that stay on the device; None where no kernel fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.gpu import dispatch
from shaketable.faults.gpu.tiling import launch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, PARTIALS = 2048, 4096
MEAN, SPREAD, SIZE = 0, 1, 2


def _share(n: int) -> tuple[int, int]:
    """Blocks that each program takes, a power of two, and how many programs that makes."""
    blocks = -(-n // BLOCK)
    share = 1 << max(0, -(-blocks // PARTIALS) - 1).bit_length()
    return share, -(-blocks // share)


def top(x: Tensor, *, finite: bool) -> Tensor | None:
    """The largest magnitude, float32; NaN where there is one, unless only what is `finite` counts."""
    import torch

    if not dispatch.fits(x):
        return None
    from shaketable.faults.gpu.kernels import reductions as kernels

    x = x.contiguous()
    share, programs = _share(x.numel())
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    launch(kernels.tops, programs, x, partial, x.numel(), FINITE=finite, ALIGNED=x.numel() % 16 == 0, SHARE=share, BLOCK=BLOCK)
    launch(kernels.top_of_tops, 1, partial, out, programs)
    return out


def moment(x: Tensor, which: int) -> Tensor | None:
    """The mean, spread or size of the finite values, float32."""
    import torch

    if not dispatch.fits(x):
        return None
    from shaketable.faults.gpu.kernels import reductions as kernels

    x = x.contiguous()
    share, programs = _share(x.numel())
    partial = torch.empty(3 * PARTIALS, dtype=torch.float64, device=x.device)
    out = torch.empty(3, dtype=torch.float32, device=x.device)
    launch(kernels.sums, programs, x, partial, x.numel(), ALIGNED=x.numel() % 16 == 0, SHARE=share, BLOCK=BLOCK)
    launch(kernels.moments, 1, partial, out, programs)
    return out[which]

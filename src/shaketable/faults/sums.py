"""Twelve sums over a before/after pair, from which the ledger's numbers are made.

| sum | over |
|---|---|
| values | every value |
| changed | values that differ; a NaN that stays one does not |
| alive, survived | values that were not zero before; those of them that are not zero after |
| finite | values that are finite before and after and lie in a faulty channel |
| nonzero | those of them that were not zero before |
| error, size | squared error and squared clean value, where both are finite, in every channel |
| square | squared clean value of the finite ones |
| ratio, deviation | squared relative error and absolute error of the nonzero ones |
| cross | error times clean value of the finite ones |

One pass over the data: the C++ of `native.cpp` on a CPU, `kernels/measure.py` on a GPU, plain torch elsewhere. All stay on the
tensor's device. Where `FaultBase.tells` allows it, whole rows spread evenly over the tensor are measured, up to a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.cpu import native

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.base import FaultBase

VALUES, CHANGED, ALIVE, SURVIVED, FINITE, NONZERO, ERROR, SIZE, SQUARE, RATIO, DEVIATION, CROSS = range(12)
SAMPLE = 2**14
"""Values that tell a magnitude within a hundredth."""
ROWS = 2**16
"""Values in whole rows, for faults whose law is about a row."""


def usable_mask(clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> Tensor:
    """Which values of a before/after pair tell a magnitude: the finite ones in faulty channels."""
    finite = clean.isfinite() & faulty.isfinite()
    return finite if lanes is None else finite & lanes


def with_float64(x: Tensor) -> Tensor:
    """The tensor itself where every device of its kind has float64; elsewhere (NPU, MPS, XPU) a copy on the host."""
    return x if x.device.type in ("cpu", "cuda", "meta") else x.cpu()


def sums(clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor:
    """The twelve sums, float64, on the tensors' device, which must have that: see `with_float64`."""
    found = native.sums(clean, faulty) if lanes is None else None
    return found if found is not None else plain_sums(clean, faulty, lanes)


def plain_sums(clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor:
    """The reference implementation, in plain torch."""
    import torch

    finite = usable_mask(clean, faulty, None)
    usable = finite if lanes is None else finite & lanes
    alive = clean.ne(0)
    nonzero = usable & alive
    c = clean.double().where(finite, 0.0)
    e = faulty.double().where(finite, 0.0) - c
    ratio = (e / c.where(c != 0, 1.0)).where(nonzero, 0.0)
    differs = clean.ne(faulty) & ~(clean.isnan() & faulty.isnan())
    counts = [torch.ones_like(alive), differs, alive, alive & faulty.ne(0), usable, nonzero]
    parts = [e.square(), c.square(), c.square().where(usable, 0.0), ratio.square(), e.abs().where(nonzero, 0.0)]
    parts.append((e * c).where(usable, 0.0))
    return torch.stack([part.sum().double() for part in (*counts, *parts)])


def sample(fault: FaultBase, clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The part of a pair that is measured, and its faulty channels."""
    most = {"values": SAMPLE, "rows": ROWS}.get(fault.tells, clean.numel())
    if clean.numel() <= most or clean.dim() == 0:
        return clean, faulty, lanes
    width = clean.shape[-1] if clean.dim() > 1 or fault.tells == "rows" else 1
    step = -(-clean.numel() // max(most, width))
    if lanes is not None and (lanes.dim() > 1 or width == 1):
        lanes = lanes.expand(clean.shape).reshape(-1, width)[::step]
    return clean.reshape(-1, width)[::step], faulty.reshape(-1, width)[::step], lanes

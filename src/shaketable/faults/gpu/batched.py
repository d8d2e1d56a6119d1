"""One launch for many tensors: formats on all weights of a plan, noise on all norms of a model.

A launch costs the same for 200 weights as for one. The table that the kernels read is made once per set of tensors. What is
another at every draw of noise is the same for all of them, and an argument: the moment, which a kernel makes the key of each
tensor from, and the scale. A table with keys would be 61 rows of Python and a copy that waits for the GPU, at every rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shaketable.faults.gpu import dispatch
from shaketable.faults.rng import signed

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.base import FaultBase

_TILE, _BLOCK, SUMS = 2048, 2048, 7
LONGEST = 8 * _BLOCK
"""Values of the longest tensor that one program draws the noise of."""
_CODES = {"mxfp4": (0, 32), "fp8_e4m3": (2, 128), "fp8_e5m2": (3, 128)}
_DRAWS = {"relative_gaussian": 0, "absolute_gaussian": 1, "rms_gaussian": 2}


def codes(fault: FaultBase, x: Tensor) -> bool:
    """Whether a tensor can be among many that this format is put on: its blocks share a scale and divide the rows."""
    known = _CODES.get(fault.kind)
    if known is None or not fault.is_steady or fault.sparsity != 1 or getattr(fault, "scope", "block") != "block":
        return False
    return x.dim() > 0 and x.shape[-1] % known[1] == 0 and _lies_well(x)


def draws(fault: FaultBase, x: Tensor) -> bool:
    """Whether a tensor can be among many that this noise is drawn for."""
    return fault.kind in _DRAWS and fault.sparsity == 1 and x.numel() <= LONGEST and _lies_well(x)


def _lies_well(x: Tensor) -> bool:
    return dispatch.fits(x) and x.is_contiguous() and x.data_ptr() % 16 == 0


class CodedBatch:
    """A format from some tensors of one type and device into others like them."""

    def __init__(self, fault: FaultBase, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.base, (code, length) = pairs[0][0], _CODES[fault.kind]
        programs = torch.tensor([-(-x.numel() // _TILE) for x, _ in pairs])
        firsts = (programs.cumsum(0) - programs).tolist()
        rows = [[*_places(self.base, x, y), first, 0] for (x, y), first in zip(pairs, firsts, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.base.device)
        self.owners = torch.arange(len(pairs), dtype=torch.int32).repeat_interleave(programs).to(self.base.device)
        self.shape = _shape(self.base) | {"KIND": code, "LENGTH": length, "GROUP": _TILE // length}

    def __call__(self) -> None:
        """Quantize all of them as they are now."""
        from shaketable.faults.gpu.kernels.batched import quantize_many

        values = (self.base, self.table, self.owners)
        dispatch.launch(quantize_many, len(self.owners), values, self.shape, enable_fp_fusion=False)


class NoiseBatch:
    """Noise of one kind from some tensors of one type and device into others like them.

    `places` are what tells their keys apart: that of a tensor at some moment is `mix64(place ^ moment)`.
    """

    def __init__(self, fault: FaultBase, pairs: list[tuple[Tensor, Tensor]], places: list[int]) -> None:
        self.base = pairs[0][0]
        rows = [[*_places(self.base, x, y), 0, signed(place, 64)] for (x, y), place in zip(pairs, places, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.base.device)
        blocks = max(-(-x.numel() // _BLOCK) for x, _ in pairs)
        self.shape = _shape(self.base) | {"KIND": _DRAWS[fault.kind], "BLOCKS": blocks, "BLOCK": _BLOCK}

    def __call__(self, moment: int, magnitude: float) -> Tensor:
        """Draw all of them as they are now; returns what was changed, a row of sums for each."""
        from shaketable.faults.gpu.kernels.batched import draw_many

        proof = torch.empty(len(self.table), SUMS, dtype=torch.float64, device=self.base.device)
        values = (self.base, self.table, proof, *dispatch.words(moment), magnitude)
        dispatch.launch(draw_many, len(self.table), values, self.shape)
        return proof


def magnitude(fault: FaultBase, sums: list[float]) -> float | None:
    """The magnitude that a row of sums tells, as the fault's `read_back` would; None when it does not tell."""
    values, _, alive, _, error, square, ratio = sums
    kind = fault.kind
    top, bottom = (ratio, alive) if kind == "relative_gaussian" else (error, values if kind == "absolute_gaussian" else square)
    return (top / bottom) ** 0.5 if bottom else None


def _places(base: Tensor, x: Tensor, y: Tensor) -> tuple[int, int, int]:
    home = base.data_ptr()
    return (x.data_ptr() - home) // 16, (y.data_ptr() - home) // 16, x.numel()


def _shape(base: Tensor) -> dict[str, Any]:
    return {"UNIT": 16 // base.element_size(), "FAST": not dispatch.interpreting()}

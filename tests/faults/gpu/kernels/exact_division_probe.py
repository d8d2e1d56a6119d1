"""Kernels that call the arithmetic of quotients and do nothing else: used by test_exact_division.py."""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.exact_division import fused, quotient


@triton.jit
def fused_probe(a, b, c, out, n, FAST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    result = fused(tl.load(a + i, mask=inside), tl.load(b + i, mask=inside), tl.load(c + i, mask=inside), FAST)
    tl.store(out + i, result, mask=inside)


@triton.jit
def quotient_probe(a, b, c, out, n, FAST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, quotient(tl.load(a + i, mask=inside), tl.load(b + i, mask=inside), FAST), mask=inside)

"""Instructions that a GPU has and Triton's language does not name."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def asm(TEXT: tl.constexpr, x):
    """One float32 instruction of one operand."""
    return tl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

"""Triton: what compiled graphs tell of their strikes, counted and measured for a whole pass at once."""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.told_kernels import PROOF, TOLD, tell


@triton.jit
def heads(head, marks, rows, proof, BLOCK: tl.constexpr):
    """One strike per program: its fire, and in passes that are told what its first values were and became.

    Where there are fewer values than `BLOCK`, and where a value is not a number, the clean one is NaN and is left out.
    """
    i = tl.program_id(0)
    row, place = tl.load(marks + 2 * i), tl.load(marks + 2 * i + 1)
    on = tl.load(rows + 4 * row + 3)
    if on != 0:
        proof += PROOF * place
        tl.atomic_add(proof + 6 + on % TOLD, 1.0)
        if on >= TOLD:
            at = head + 2 * BLOCK * i + tl.arange(0, BLOCK)
            clean, faulty = tl.load(at), tl.load(at + BLOCK)
            tell(clean, faulty, clean == clean, proof, True)

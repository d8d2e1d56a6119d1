"""Faults on a GPU: fused Triton kernels, chosen where they fit; None where plain torch has to do it.

Plain torch (`noise.py`, `formats.py`, …) stays the reference that these are tested against: in Triton's interpreter on every
machine, on a GPU with the results committed.
"""

from shaketable.faults.gpu.clipping import clipped
from shaketable.faults.gpu.dispatch import (
    ADDITIVE,
    BIAS,
    BLOCK,
    GAIN,
    LARGEST,
    OTHER,
    RELATIVE,
    SYSTEMATIC,
    TableRow,
    fits,
    name,
    noise,
    sample_sums,
    shift,
    tell,
)
from shaketable.faults.gpu.formats import coded
from shaketable.faults.gpu.reductions import MEAN, SIZE, SPREAD, moment, top

__all__ = [
    "ADDITIVE",
    "BIAS",
    "BLOCK",
    "GAIN",
    "LARGEST",
    "MEAN",
    "OTHER",
    "RELATIVE",
    "SIZE",
    "SPREAD",
    "SYSTEMATIC",
    "TableRow",
    "clipped",
    "coded",
    "fits",
    "moment",
    "name",
    "noise",
    "sample_sums",
    "shift",
    "tell",
    "top",
]

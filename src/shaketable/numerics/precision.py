"""What a device is documented to do to numbers beyond their dtype: TF32 and bfloat16 products of float32 factors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shaketable.numerics.intervals import Precision

TOLERANCE = {torch.float32: (128.0, 2.0**-24), torch.bfloat16: (6.0, 2.0**-8), torch.float16: (6.0, 2.0**-11)}
"""κ and unit roundoff: how far two results of one layer may be apart in κ·(u(|x| + |y|) + 4u·rms(y − x))."""


def device_precision(device: torch.device, dtype: torch.dtype) -> Precision:
    """What to allow for on this device, from torch's own switches."""
    if dtype != torch.float32:
        return Precision()
    asked = torch.get_float32_matmul_precision()
    if device.type == "cuda" and (asked != "highest" or torch.backends.cuda.matmul.allow_tf32):
        return Precision(2.0**-10, 0.0, "float32 products may use TF32: their factors are taken as rounded to 10 bits")
    if device.type != "cuda" and asked == "medium":
        return Precision(2.0**-8, 0.0, "float32 products may use bfloat16: their factors are taken as rounded to 8 bits")
    return Precision()


def tolerance(precision: Precision, dtype: torch.dtype) -> tuple[float, float]:
    """κ and u of the tests with a tolerance."""
    return (6.0, precision.product_input) if precision.product_input else TOLERANCE[dtype]


@contextmanager
def host_arithmetic() -> Iterator[None]:
    """The host's own arithmetic, whatever mode of torch is active around: one may be how a faulty device is emulated."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield

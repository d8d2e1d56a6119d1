"""Which kernel, which variant, and how it is launched."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shaketable.faults.rng import signed

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.gpu.launch import Launcher

BLOCK, WARPS = 2048, 4
LARGEST = 2**31 - BLOCK
"""Counters of pairs are 32 bits wide; larger tensors go through plain torch."""
RELATIVE, ADDITIVE = 0, 1
BIAS, GAIN, SYSTEMATIC, OTHER = 2, 3, 4, 5
STEPS, STEP = 16, 1024
"""How many values `tell` looks at: so many steps of so many."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """What a kernel reads from the GPU's memory, and where it counts: see `inject/cuda_graphs.py`."""

    rows: Tensor
    """Rows of two words of key, the scale's bits, and flags, 0 when it is off; int32."""
    sums: Tensor
    """What is counted and measured, a row per tap and direction; float64."""
    row: int
    place: int
    """Which row of `sums`."""


@functools.cache
def _kernels() -> Any:
    """The kernels, where Triton is installed and not switched off; None elsewhere."""
    if os.environ.get("SHAKETABLE_NATIVE") == "0":
        return None
    try:
        from shaketable.faults.gpu.kernels import noise as noise_kernels
    except ImportError:
        return None
    return noise_kernels


def name(device: str) -> str | None:
    """What the ledger calls the kernels of a device; None where there are none."""
    return "triton" if device == "cuda" and _kernels() is not None else None


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    import torch

    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cuda
    return plain and x.dtype in _floats() and 0 < x.numel() <= LARGEST and _kernels() is not None


@functools.cache
def _floats() -> tuple[Any, ...]:
    import torch

    return torch.float32, torch.bfloat16, torch.float16


def words(value: int) -> tuple[int, int]:
    """The two halves of 64 bits, the low one first, as kernels take them."""
    return signed(value), signed(value >> 32)


_launchers: dict[Any, Launcher] = {}


def noise(
    x: Tensor,
    scale: float,
    key: int,
    *,
    relative: bool,
    unit: Tensor | None = None,
    live: TableRow | None = None,
) -> Tensor | None:
    """x + |x|·z·scale (relative) or x + z·scale·unit in one pass; None where no kernel fits.

    Args:
        x: The clean tensor.
        scale: The magnitude, or the factor of `unit`.
        key: Keys the noise: `Draw.key`.
        relative: Noise in units of each value.
        unit: One float32 number on the device.
        live: What the kernel reads instead of `scale` and `key`.
    """
    if not fits(x):
        return None
    x, y, n, table = _arguments(x, live)
    kind = RELATIVE if relative else ADDITIVE
    shape = {"KIND": kind, "UNIT": unit is not None, **_shape(n, live)}
    launch(_kernels().noise, -(-n // BLOCK), (x, y, n, scale, *words(key), unit, *table), shape)
    return y


def _arguments(x: Tensor, live: TableRow | None) -> tuple[Tensor, Tensor, int, tuple[Any, ...]]:
    """What is read, what is written, how many values, and the row of the table."""
    import torch

    x = x.contiguous()
    return x, torch.empty_like(x), x.numel(), (live.rows, live.sums, live.row, live.place) if live else (None, None, 0, 0)


def _shape(n: int, live: TableRow | None) -> dict[str, Any]:
    return {"LIVE": live is not None, "FAST": not interpreting(), "EVEN": n % BLOCK == 0, "BLOCK": BLOCK}


def shift(x: Tensor, scale: float, kind: int, *, unit: Tensor | None = None, live: TableRow | None = None) -> Tensor | None:
    """Bias, gain or systematic bias in one pass; None where no kernel fits."""
    if not fits(x):
        return None
    x, y, n, table = _arguments(x, live)
    launch(_kernels().arithmetic, -(-n // BLOCK), (x, y, n, scale, unit, *table), {"KIND": kind, **_shape(n, live)})
    return y


def sample_sums(x: Tensor, y: Tensor) -> Tensor | None:
    """The twelve sums of `faults/sums.py` over rows spread over a pair, by one launch; None where no kernel fits."""
    if not fits(x) or not fits(y) or x.dtype is not y.dtype or not (x.is_contiguous() and y.is_contiguous()):
        return None
    import torch

    from shaketable.faults.gpu.kernels import measure

    out = torch.empty(12, dtype=torch.float64, device=x.device)
    shape = {"STEPS": STEPS, "BLOCK": STEP, "FAST": not interpreting()}
    launch(measure.twelve_sums, 1, (x, y, out, *_spread(x)), shape)
    return out


def _spread(x: Tensor) -> tuple[int, int, int]:
    """How many values are looked at, in pieces of which width, and how far the pieces are apart."""
    most = STEPS * STEP
    width = min(x.shape[-1], most) if x.dim() else 1
    if x.numel() <= most:
        return x.numel(), width, width
    return most // width * width, width, max(1, x.numel() // most) * width


def tell(x: Tensor, y: Tensor, live: TableRow, kind: int = OTHER, *, sparse: bool = False) -> None:
    """Count and, when it is due, measure a before/after pair, by rows spread over it; `sparse`: some channels are faulty."""
    from shaketable.faults.gpu.kernels import measure

    x, y = x.contiguous(), y.contiguous()
    n, width, stride = _spread(x)
    shape = {"KIND": kind, "SPARSE": sparse, "STEPS": STEPS, "BLOCK": STEP, "FAST": not interpreting()}
    launch(measure.tell, 1, (x, y, n, live.rows, live.sums, live.row, live.place, width, stride), shape)


def launch(kernel: Any, programs: int, values: tuple[Any, ...], shape: dict[str, Any], warps: int = WARPS, **more: Any) -> None:
    """Launch any kernel: through Triton the first time, then directly, where nothing that Triton looks at is another."""
    import torch

    device = values[0].get_device()
    key = _key(kernel, values, shape, warps)
    launcher = _launchers.get(key)
    if launcher is not None and device == torch._C._cuda_getDevice():
        launcher(programs, device, tuple(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))
        return
    with nullcontext() if device < 0 else torch.cuda.device(device):
        compiled = kernel[(programs,)](*values, **shape, num_warps=warps, **more)
    if device >= 0 and all(v.__class__ is not int or abs(v) < 2**31 for v in values):
        from shaketable.faults.gpu.launch import Launcher

        _launchers[key] = Launcher(compiled, tuple(shape.values()))


def _key(kernel: Any, values: tuple[Any, ...], shape: dict[str, Any], warps: int) -> tuple[Any, ...]:
    return (id(kernel), *map(_seen, values), *shape.values(), warps, values[0].get_device())


def _seen(value: Any) -> Any:
    """What Triton makes another variant for: a pointer's type and alignment, a number that 16 divides, the number 1."""
    if isinstance(value, int):
        return value % 16 == 0, value == 1, abs(value) < 2**31
    return value if value is None else float if isinstance(value, float) else (value.dtype, value.data_ptr() % 16 == 0)

"""Which kernel, which variant, and how it is launched."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.gpu.launcher import KeyedLaunch, Launch, Launcher

BLOCK, WARPS = 2048, 4
LARGEST = 2**31 - BLOCK
"""Counters of pairs are 32 bits wide; larger tensors go through plain torch."""
RELATIVE, ADDITIVE = 0, 1
BIAS, GAIN, SYSTEMATIC = 2, 3, 4
_NOISE = ("pointer", "pointer", "int", "float", "int", "int", "pointer", "pointer", "pointer", "int", "int")
_SHIFT = ("pointer", "pointer", "int", "float", "pointer", "pointer", "pointer", "int", "int")


@dataclass(frozen=True, slots=True)
class Live:
    """What a captured kernel reads from the card's memory at every replay, and where it tells what it did."""

    rows: Tensor
    """Rows of two words of key, the scale's bits, and the number of the phase from one on, or 0 when it is off; int32."""
    proof: Tensor
    """Sums per tap over what was changed, float64."""
    row: int
    place: int
    """Which row of `proof`."""


@functools.cache
def _kernels() -> Any:
    """The kernels, where Triton is installed and not switched off; None elsewhere."""
    if os.environ.get("SHAKETABLE_NATIVE") == "0":
        return None
    try:
        from shaketable.faults.gpu import noise_kernels
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
    return _signed(value), _signed(value >> 32)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


_launchers: dict[Any, Launcher] = {}


def noise(
    x: Tensor,
    scale: float,
    key: int,
    *,
    relative: bool,
    unit: Tensor | None = None,
    in_place: bool = False,
    live: Live | None = None,
) -> Tensor | None:
    """x + |x|·z·scale (relative) or x + z·scale·unit in one pass; None where no kernel fits.

    Args:
        x: What is struck.
        scale: The magnitude, or the factor of `unit`.
        key: Keys the noise: `Draw.key`.
        relative: Noise in units of each value.
        unit: One float32 number on the device.
        in_place: Write into `x` itself; it must be contiguous.
        live: What a captured kernel reads instead of `scale`.
    """
    if not fits(x):
        return None
    return _noise(x, scale, key, relative, unit, in_place, live)


def _noise(x: Tensor, scale: float, key: int, relative: bool, unit: Tensor | None, in_place: bool, live: Live | None) -> Tensor:
    import torch

    x = x if in_place else x.contiguous()
    y = x if in_place else torch.empty_like(x)
    n = x.numel()
    variant = (RELATIVE if relative else ADDITIVE, unit is not None, live is not None, not interpreting(), n % BLOCK == 0)
    board = (live.rows, live.proof, live.row, live.place) if live else (None, None, 0, 0)
    values = (x, y, n, scale, _signed(key), _signed(key >> 32), unit, *board)
    _launch("noise", _NOISE, values, variant, n)
    return y


def shift(
    x: Tensor, scale: float, kind: int, *, unit: Tensor | None = None, in_place: bool = False, live: Live | None = None
) -> Tensor | None:
    """Bias, gain or systematic bias in one pass; None where no kernel fits."""
    import torch

    if not fits(x):
        return None
    x = x if in_place else x.contiguous()
    y = x if in_place else torch.empty_like(x)
    n = x.numel()
    board = (live.rows, live.proof, live.row, live.place) if live else (None, None, 0, 0)
    values = (x, y, n, scale, unit, *board)
    _launch("arithmetic", _SHIFT, values, (kind, live is not None, not interpreting(), n % BLOCK == 0), n)
    return y


def tick(board: tuple[Tensor, ...], moment: int | None) -> None:
    """A new moment on a board, given or the next one of its clock: see `inject/board.py`."""
    live, rows = board[2], board[3]
    taps = len(live)
    shape = {"GIVEN": moment is not None, "TAPS": taps, "REPEATS": len(rows) // (2 * taps), "BLOCK": 1024}
    launch(_kernels().tick, 1, (*board, *words(moment or 0)), shape)


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
    if device >= 0 and driver_is_here() and all(v.__class__ is not int or (v != 1 and abs(v) < 2**31) for v in values):
        from shaketable.faults.gpu.launcher import Launcher

        kinds = tuple("float" if isinstance(v, float) else "int" if isinstance(v, int) else "pointer" for v in values)
        _launchers[key] = Launcher(compiled, kinds)


def launcher(kernel: Any, values: tuple[Any, ...], shape: dict[str, Any], warps: int = WARPS) -> Launcher | None:
    """What `launch` with these arguments goes through when it has been called before; None before, and without a driver."""
    return _launchers.get(_key(kernel, values, shape, warps))


def _key(kernel: Any, values: tuple[Any, ...], shape: dict[str, Any], warps: int) -> tuple[Any, ...]:
    return (id(kernel), *map(_seen, values), *shape.values(), warps, values[0].get_device())


def _seen(value: Any) -> Any:
    """What Triton makes another variant for: a pointer's type and alignment, a number that 16 divides, the number 1."""
    if isinstance(value, int):
        return value % 16 == 0, value == 1, abs(value) < 2**31
    return float if isinstance(value, float) else (value.dtype, value.data_ptr() % 16 == 0)


def _launch(kernel: str, kinds: tuple[str, ...], values: tuple[Any, ...], variant: tuple[Any, ...], n: int) -> None:
    """Launch a variant: through Triton the first time, and where pointers are not as aligned as they were then."""
    import torch

    x, y = values[0], values[1]
    blocks = -(-n // BLOCK)
    address, target = x.data_ptr(), y.data_ptr()
    device = x.get_device()
    here = device >= 0 and device == torch._C._cuda_getDevice() and (address | target) % 16 == 0
    launcher = _launchers.get((kernel, variant, x.dtype, device)) if here else None
    if launcher is not None:
        rest = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values[2:]]
        launcher(blocks, device, (address, target, *rest))
        return
    with nullcontext() if device < 0 else torch.cuda.device(device):
        filled = [x if v is None else v for v in values]
        compiled = getattr(_kernels(), kernel)[(blocks,)](*filled, *variant, BLOCK=BLOCK, num_warps=WARPS)
    if here and driver_is_here():
        from shaketable.faults.gpu.launcher import Launcher

        _launchers[kernel, variant, x.dtype, device] = Launcher(compiled, kinds)


def prepare(x: Tensor, kind: int, live: Live) -> Launch | None:
    """Noise in place on tensors like `x`, ready to be launched with an address; None where no kernel fits."""
    n, device = x.numel(), x.get_device()
    if not fits(x) or not driver_is_here():
        return None
    variant = (kind, False, True, True, n % BLOCK == 0)
    if ("noise", variant, x.dtype, device) not in _launchers:
        import torch

        nothing = Live(torch.zeros_like(live.rows), live.proof, 0, 0)
        _noise(torch.zeros(n, dtype=x.dtype, device=x.device), 0.0, 0, kind == RELATIVE, None, True, nothing)
    from shaketable.faults.gpu.launcher import Launch

    return Launch(_launchers["noise", variant, x.dtype, device], -(-n // BLOCK), x, live)


def prepare_keyed(x: Tensor, kind: int, scale: float) -> KeyedLaunch | None:
    """Noise on tensors like `x`, in place or not, ready to be launched with addresses and a key; None where no kernel fits."""
    n, device = x.numel(), x.get_device()
    if not fits(x) or not driver_is_here():
        return None
    variant = (kind, False, False, True, n % BLOCK == 0)
    if ("noise", variant, x.dtype, device) not in _launchers:
        import torch

        scratch = torch.zeros(BLOCK if n % BLOCK == 0 else 1, dtype=x.dtype, device=x.device)
        _noise(scratch, 0.0, 0, kind == RELATIVE, None, True, None)
    from shaketable.faults.gpu.launcher import KeyedLaunch

    launcher = _launchers.get(("noise", variant, x.dtype, device))
    return None if launcher is None else KeyedLaunch(launcher, -(-n // BLOCK), x, scale)


@functools.cache
def driver_is_here() -> bool:
    """Whether kernels can be launched without Triton."""
    from shaketable.faults.gpu.launcher import driver

    return driver() is not None

"""The kernels of a GPU: which one does a fault, which variant, and how it is launched. None where plain torch has to do it.

Plain torch (`noise.py`, `formats.py`, …) is the reference that these are tested against. `kernel[grid](…)` costs 20
microseconds of Python, three times what the launch of a torch operator does, so after the first call of a variant the launcher
that Triton has compiled for it is called directly.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shaketable.faults.gpu.tiling import one_row, segments
from shaketable.faults.rng import signed

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.base import FaultBase

BLOCK, WARPS = 2048, 4
LARGEST = 2**31 - BLOCK
"""Counters of pairs are 32 bits wide; larger tensors go through plain torch."""
RELATIVE, ADDITIVE = 0, 1
BIAS, GAIN, SYSTEMATIC, OTHER = 2, 3, 4, 5
STEPS, STEP = 16, 1024
"""How many values `tell` looks at: so many steps of so many."""
PARTIALS = 4096
MEAN, SPREAD, SIZE = 0, 1, 2
_CLIPS = {"dead_zone": 0, "saturation": 1}
_CLIP_SCOPES = {"absolute": 0, "tensor": 1, "token": 2, "block": 2}
_FORMATS = {"mxfp4": (0, 32), "nvfp4": (1, 16), "fp8_e4m3": (2, 128), "fp8_e5m2": (3, 128)}
"""What the kernel calls a format, and the length of its blocks."""
_FORMAT_SCOPES = {"none": 0, "tensor": 1, "token": 2, "block": 2}
_RECIPES = {"relative_gaussian": RELATIVE, "absolute_gaussian": ADDITIVE, "gain": GAIN, "systematic_bias": SYSTEMATIC}
"""Faults that one kernel does as a whole, so that they can be captured into a CUDA graph with a magnitude that may change."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Where a captured kernel reads its key and scale, and where it counts: see `inject/cuda_graphs.py`."""

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


@functools.cache
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
    shape = {"KIND": RELATIVE if relative else ADDITIVE, "UNIT": unit is not None, **_shape(n, live)}
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


# ---- a tensor's largest magnitude, mean, standard deviation and root mean square, which stay on the device


def _share(n: int) -> tuple[int, int]:
    """Blocks that each program takes, a power of two, and how many programs that makes."""
    blocks = -(-n // BLOCK)
    share = 1 << max(0, -(-blocks // PARTIALS) - 1).bit_length()
    return share, -(-blocks // share)


def top(x: Tensor, *, finite: bool) -> Tensor | None:
    """The largest magnitude, float32; NaN where there is one, unless only what is `finite` counts."""
    import torch

    if not fits(x):
        return None
    from shaketable.faults.gpu.kernels import reductions as kernels

    x = x.contiguous()
    share, programs = _share(x.numel())
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    shape = {"FINITE": finite, "ALIGNED": x.numel() % 16 == 0, "SHARE": share, "BLOCK": BLOCK}
    launch_apart(kernels.tops, programs, x, partial, x.numel(), **shape)
    launch_apart(kernels.top_of_tops, 1, partial, out, programs)
    return out


def moment(x: Tensor, which: int) -> Tensor | None:
    """The mean, spread or size of the finite values, float32."""
    import torch

    if not fits(x):
        return None
    from shaketable.faults.gpu.kernels import reductions as kernels

    x = x.contiguous()
    share, programs = _share(x.numel())
    partial = torch.empty(3 * PARTIALS, dtype=torch.float64, device=x.device)
    out = torch.empty(3, dtype=torch.float32, device=x.device)
    launch_apart(kernels.sums, programs, x, partial, x.numel(), ALIGNED=x.numel() % 16 == 0, SHARE=share, BLOCK=BLOCK)
    launch_apart(kernels.moments, 1, partial, out, programs)
    return out[which]


# ---- clipping and formats


def clipped(x: Tensor, kind: str, magnitude: float, scope: str, block: int, g: Tensor | None = None) -> Tensor | None:
    """The clipped tensor, or with `g` the gradient that passes.

    Args:
        x: The clean tensor.
        kind: The fault, as a plan names it.
        magnitude: The fraction of the maximum, or the ceiling itself where the scope is `absolute`.
        scope: What the maximum is taken over.
        block: How many values that is where the scope is `block`.
        g: The gradient with respect to the clipped tensor.
    """
    import torch

    if not fits(x) or not (g is None or (fits(g) and g.shape == x.shape)):
        return None
    length = min(block, x.shape[-1]) if scope == "block" and x.dim() else None
    parts = one_row(x.numel()) if scope in ("absolute", "tensor") else segments(x, length)
    if parts.padded > LARGEST:
        return None
    from shaketable.faults.gpu.kernels.clipping import clip

    x = x.contiguous()
    back = x if g is None else g.contiguous()
    y = torch.empty_like(back)
    whole = top(x, finite=True) if scope == "tensor" else x
    how = {"KIND": _CLIPS[kind], "SCOPE": _CLIP_SCOPES[scope], "GRADIENT": g is not None, **parts.shape}
    launch_apart(clip, parts.programs, x, back, y, whole, magnitude, *parts.sizes, warps=parts.warps, **how)
    return y


def coded(x: Tensor, kind: str, scope: str, key: int | None) -> Tensor | None:
    """Quantize and dequantize in one pass, and one before it where the tensor's maximum is asked for.

    Args:
        x: What is quantized, along its last dimension.
        kind: The format, as a plan names it.
        scope: What shares one scale: tensor, token, block or none.
        key: `Draw.key` for stochastic rounding, None for rounding to even.
    """
    import torch

    if not fits(x):
        return None
    code, block = _FORMATS[kind]
    parts = one_row(x.numel()) if scope in ("none", "tensor") else segments(x, block if scope == "block" else None)
    if parts.padded > LARGEST:
        return None
    from shaketable.faults.gpu.kernels.formats import quantize

    x = x.contiguous()
    y = torch.empty_like(x)
    whole = top(x, finite=False) if scope == "tensor" or kind == "nvfp4" else x
    how = {"KIND": code, "SCOPE": _FORMAT_SCOPES[scope], "STOCHASTIC": key is not None, **parts.shape}
    launch_apart(quantize, parts.programs, x, y, whole, *parts.sizes, *words(key or 0), warps=parts.warps, **how)
    return y


# ---- what is captured into a CUDA graph


class Recipe(NamedTuple):
    """How one kernel does a fault."""

    kind: int
    scale: float
    """The one number that a changed magnitude changes."""

    def apply(self, x: Tensor, live: TableRow) -> Tensor | None:
        """The faulty tensor, with everything that may change read from the GPU's memory."""
        if self.kind in (RELATIVE, ADDITIVE):
            return noise(x, 0.0, 0, relative=self.kind == RELATIVE, live=live)
        return shift(x, 0.0, self.kind, live=live)


def recipe(fault: FaultBase) -> Recipe | None:
    """How one kernel does this fault; None where it takes more than that."""
    kind, magnitude = _RECIPES.get(fault.kind), fault.asked()
    if kind is None or magnitude is None:
        return None
    return Recipe(kind, 1.0 + magnitude if kind == GAIN else magnitude)


# ---- launching


class Launcher:
    """One variant of one kernel on one device."""

    __slots__ = ("_constants", "_head", "_run")

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        run, words = compiled.run, (compiled.packed_metadata, None, None, None)
        scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
        if scratch == 0 and hasattr(run, "launch"):  # what `run` itself calls when it has no memory to find
            self._run = run.launch
            how: tuple[Any, ...] = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        else:
            self._run, how = run, ()
        self._head, self._constants = (compiled.function, *how, *words), constants

    def __call__(self, programs: int, stream: int, values: list[Any]) -> None:
        """Launch on a stream of the current device. Tensors are given by their addresses."""
        self._run(programs, 1, 1, stream, *self._head, *values, *self._constants)


_launchers: dict[Any, Launcher] = {}


def launch(kernel: Any, programs: int, values: tuple[Any, ...], shape: dict[str, Any], warps: int = WARPS, **more: Any) -> None:
    """Launch any kernel: through Triton the first time, then directly.

    Of its values Triton looks at the type and the alignment of tensors, and at nothing else: our kernels take numbers of 32
    bits, and ask Triton not to specialize on them.
    """
    import torch

    device = values[0].get_device()
    seen = [(v.dtype, v.data_ptr() % 16 == 0) if isinstance(v, torch.Tensor) else v is None for v in values]
    key = (id(kernel), device, warps, *shape.values(), *seen)
    launcher = _launchers.get(key)
    if launcher is not None and device == torch._C._cuda_getDevice():
        arguments = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        launcher(programs, torch._C._cuda_getCurrentRawStream(device), arguments)
        return
    with nullcontext() if device < 0 else torch.cuda.device(device):
        compiled = kernel[(programs,)](*values, **shape, num_warps=warps, **more)
    if device >= 0:
        _launchers[key] = Launcher(compiled, tuple(shape.values()))


def launch_apart(kernel: Any, programs: int, x: Tensor, *values: Any, warps: int = 4, **shape: Any) -> None:
    """Launch with products and sums kept apart: a fused one rounds once where plain torch rounds twice."""
    constants = shape | {"FAST": not interpreting()}
    launch(kernel, programs, (x, *values), constants, warps, enable_fp_fusion=False)

"""The C++ kernels of `native.cpp`, called through ctypes, built once per machine with whatever compiler is there.

Without a compiler (or with SHAKETABLE_NATIVE=0) plain torch does the same arithmetic with the same bits, only slower; the
ledger says which of the two was used. The library goes to the user's cache under a name made from source, compiler, CPU and
Python.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.io.cache_folder import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")


def available() -> bool:
    """Whether the compiled kernels can be used in this process."""
    return _library() is not None


def name() -> str:
    """What the ledger calls the generator in use."""
    return "native" if available() else "torch"


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, g++, c++ or clang++."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for n in names if n and (found := shutil.which(n))), None)


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = _built()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    pointer, size, u32, f32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_float
    library.normals_f32.argtypes = [pointer, size, u32, u32]
    for dtype in ("f32", "bf16"):
        for fault in ("relative", "absolute"):
            getattr(library, f"{fault}_{dtype}").argtypes = [pointer, pointer, size, f32, u32, u32]
        getattr(library, f"mxfp4_{dtype}").argtypes = [pointer, pointer, size, size]
        getattr(library, f"sums_{dtype}").argtypes = [pointer, pointer, size, pointer]
    return library


def _built() -> Path | None:
    """The library, built now or earlier; None where it cannot be."""
    cxx = compiler()
    if os.environ.get("SHAKETABLE_NATIVE") == "0" or cxx is None:
        return None
    path = cache_folder() / "native" / f"{SOURCE.stem}-{_fingerprint(cxx)}.so"
    try:
        return path if path.exists() or _build(cxx, path) else None
    except OSError:  # a cache that cannot be written, or not even be looked into: torch makes the same noise
        return None


def _fingerprint(cxx: str) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False).stdout
    parts = [SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _cpu().encode(), sys.version.encode()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(cxx: str, path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        done = subprocess.run([cxx, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, check=False)
        if done.returncode == 0:
            built.replace(path)
    return done.returncode == 0


def normals(n: int, key: int) -> Tensor:
    import torch

    out = torch.empty(n)
    library = _library()
    assert library is not None
    library.normals_f32(out.data_ptr(), n, key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)
    return out


def _kernel(name: str, *tensors: Tensor) -> Any:
    """The kernel for plain CPU tensors of one type; None where there is none."""
    import torch

    library, dtype = _library(), tensors[0].dtype
    suffix = "f32" if dtype is torch.float32 else "bf16" if dtype is torch.bfloat16 else None
    if library is None or suffix is None:
        return None
    for x in tensors:
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu" or x.dtype is not dtype:
            return None
    return getattr(library, f"{name}_{suffix}")


def add_noise(x: Tensor, scale: float, key: int, *, relative: bool) -> Tensor | None:
    """x + x·z·scale (relative) or x + z·scale in one pass; None when no kernel fits this tensor."""
    import torch

    kernel = _kernel("relative" if relative else "absolute", x)
    if kernel is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel(x.data_ptr(), out.data_ptr(), x.numel(), scale, key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)
    return out


def sums(clean: Tensor, faulty: Tensor) -> Tensor | None:
    """The twelve sums of `faults/sums.py` over a before/after pair; None when no kernel fits these tensors."""
    import torch

    kernel = _kernel("sums", clean, faulty)
    if kernel is None:
        return None
    x, y, out = clean.contiguous(), faulty.contiguous(), torch.empty(12, dtype=torch.float64)
    kernel(x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr())
    return out


def mxfp4(x: Tensor) -> Tensor | None:
    """MXFP4 quantize-dequantize along the last dimension; None when no kernel fits this tensor."""
    import torch

    kernel = _kernel("mxfp4", x)
    if kernel is None or x.numel() == 0:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    cols = x.shape[-1]
    kernel(x.data_ptr(), out.data_ptr(), x.numel() // cols, cols)
    return out

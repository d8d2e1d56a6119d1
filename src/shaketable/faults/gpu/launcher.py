"""Launching a compiled Triton kernel without Triton's work per call.

`kernel[grid](…)` looks at every argument, builds a key, finds the variant and calls a launcher: 20 microseconds of Python on
the machines that were measured, three times what the launch of a torch operator costs. A hook on each of 210 linears pays
that 210 times per forward. Which variant is needed is known here from a handful of flags; so after the first call the
driver is called directly, through ctypes, with arguments laid out once.

Where the driver's library is not there (Triton's interpreter, another vendor's card), Triton launches.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shaketable.faults import native
from shaketable.faults.generator import mix64

if TYPE_CHECKING:
    from shaketable.faults.gpu.dispatch import Live

SPARE = 4
"""Triton appends pointers to scratch memory that these kernels do not use; the driver reads as many as there are."""
_NOTHING = ctypes.c_void_p()
_TYPES: dict[str, Any] = {"pointer": ctypes.c_void_p, "int": ctypes.c_int32, "float": ctypes.c_float}


@functools.cache
def driver() -> Any:
    """CUDA's own library, or None."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    library = ctypes.CDLL("libcuda.so.1")
    launch = library.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch


class Launcher:
    """One variant of one kernel on one device."""

    def __init__(self, compiled: Any, kinds: tuple[str, ...]) -> None:
        self.launch = driver()
        self.function = compiled.function
        self.threads = 32 * compiled.metadata.num_warps
        self.shared = compiled.metadata.shared
        self._arguments: list[Any] = [_TYPES[kind]() for kind in kinds]
        self._array = laid_out(self._arguments)
        self._lock = threading.Lock()

    def __call__(self, blocks: int, device: int, values: tuple[Any, ...]) -> None:
        """Launch on the current stream of the device, which is the current one."""
        with self._lock:
            for argument, value in zip(self._arguments, values, strict=True):
                argument.value = value
            self.go(blocks, device, self._array)

    def go(self, blocks: int, device: int, array: Any) -> None:
        """Launch with these arguments."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        failed = self.launch(self.function, blocks, 1, 1, self.threads, 1, 1, self.shared, stream, array, None)
        if failed:
            raise RuntimeError(f"CUDA driver error {failed} when a kernel of Shaketable was launched")


def laid_out(arguments: list[Any]) -> Any:
    """Arguments as the driver takes them: an array of their addresses."""
    addresses = [argument if isinstance(argument, int) else ctypes.addressof(argument) for argument in arguments]
    return (ctypes.c_void_p * (len(addresses) + SPARE))(*addresses, *[ctypes.addressof(_NOTHING)] * SPARE)


class Strike(ctypes.Structure):
    """What launching.c launches."""

    _fields_: ClassVar = [
        ("launch", ctypes.c_void_p), ("function", ctypes.c_void_p), ("blocks", ctypes.c_uint32), ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32), ("spare", ctypes.c_uint32), ("address", ctypes.c_void_p), ("row", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p), ("target", ctypes.c_void_p),
    ]  # fmt: skip


class Launch:
    """Noise in place on tensors of one size and type, for one tap of a board: all but the address is laid out.

    For one thread: nothing here is locked.
    """

    def __init__(self, launcher: Launcher, blocks: int, x: torch.Tensor, live: Live) -> None:
        self.dtype, self.device, self.row = x.dtype, x.get_device(), live.row
        self.alone = torch.cuda.device_count() == 1
        self._address, self._row = ctypes.c_uint64(), ctypes.c_int32(live.row)
        n, nothing = ctypes.c_int32(x.numel()), ctypes.c_void_p()
        rows, proof = ctypes.c_void_p(live.rows.data_ptr()), ctypes.c_void_p(live.proof.data_ptr())
        place = ctypes.c_int32(live.place)
        words = [self._address, self._address, n, nothing, nothing, nothing, nothing, rows, proof, self._row, place]
        self._kept = words, live
        self._array = laid_out(words)
        self._launcher, self._blocks = launcher, blocks
        self._strike = Strike(
            ctypes.cast(launcher.launch, ctypes.c_void_p), launcher.function, blocks, launcher.threads, launcher.shared, 0,
            ctypes.addressof(self._address), ctypes.addressof(self._row), ctypes.addressof(self._array), None,
        )  # fmt: skip
        self.go, self.at = native.striker() or self._slowly, ctypes.addressof(self._strike)

    def _slowly(self, _: int, address: int, row: int, stream: int) -> int:
        """Where there is no compiler."""
        self._address.value, self._row.value = address, row
        self._launcher.go(self._blocks, self.device, self._array)
        return 0


class KeyedLaunch:
    """Noise of one magnitude on tensors of one size and type, for a key that is given: backward comes when it wants to.

    Forward and backward run in threads of their own and share this. launching.c keeps Python's lock from the first argument to
    the launch; without a compiler the launcher has a lock.
    """

    def __init__(self, launcher: Launcher, blocks: int, x: torch.Tensor, scale: float) -> None:
        self.device, self.alone = x.get_device(), torch.cuda.device_count() == 1
        self._launcher, self._blocks, self._shape = launcher, blocks, (x.numel(), scale)
        addresses, key = (ctypes.c_uint64 * 2)(), (ctypes.c_int32 * 2)()
        n, size, nothing, zero = ctypes.c_int32(x.numel()), ctypes.c_float(scale), ctypes.c_void_p(), ctypes.c_int32()
        first, low = ctypes.addressof(addresses), ctypes.addressof(key)
        array = laid_out([first, first + 8, n, size, low, low + 4, nothing, nothing, nothing, zero, zero])
        self._strike = Strike(
            ctypes.cast(launcher.launch, ctypes.c_void_p), launcher.function, blocks, launcher.threads, launcher.shared, 0,
            first, low, ctypes.addressof(array),
        )  # fmt: skip
        self._kept = addresses, key, n, size, nothing, zero, array
        self.go, self.at = native.keyed_striker() or self._slowly, ctypes.addressof(self._strike)

    def _slowly(self, _: int, source: int, target: int, key: int, moment: int, stream: int) -> int:
        """Where there is no compiler."""
        mixed = mix64(key ^ mix64(moment))
        low, high = ctypes.c_int32(mixed & 0xFFFFFFFF).value, ctypes.c_int32(mixed >> 32).value
        self._launcher(self._blocks, self.device, (source, target, *self._shape, low, high, None, None, None, 0, 0))
        return 0

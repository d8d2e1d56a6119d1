"""Launching a compiled Triton kernel without Triton's work per call.

`kernel[grid](…)` looks at every argument, builds a key and finds the variant: 20 microseconds of Python on the machines that
were measured, three times what the launch of a torch operator costs, and 210 times per forward. Which variant is needed is
known here from a handful of flags; so after the first call the launcher that Triton has compiled for it is called directly.

Rejected: the CUDA driver through ctypes, and a C module of our own that calls it. The first is slower than Triton's own
launcher; the second saved a few hundred nanoseconds a launch for two hundred lines and a compiler at run time.
"""

from __future__ import annotations

from typing import Any

import torch

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Launcher:
    """One variant of one kernel on one device."""

    __slots__ = ("_constants", "_function", "_metadata", "_run")

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._constants = constants

    def __call__(self, programs: int, device: int, values: tuple[Any, ...]) -> None:
        """Launch on the current stream of the device, which is the current one. Tensors are given by their addresses."""
        stream = raw_stream(device)
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None, *values, *self._constants
        )  # fmt: skip


class Prepared:
    """Noise on tensors of one size and type that reads its row in the table of a GPU: all but addresses and row is fixed."""

    __slots__ = ("_after", "_before", "_run", "_shape", "alone", "device", "dtype")

    def __init__(self, launcher: Launcher, programs: int, x: torch.Tensor) -> None:
        self.dtype, self.device = x.dtype, x.get_device()
        self.alone = torch.cuda.device_count() == 1
        self._run = launcher._run
        self._before = launcher._function, launcher._metadata, None, None, None
        self._after = launcher._constants
        self._shape = programs, x.numel()

    def __call__(self, source: int, target: int, rows: int, sums: int, row: int, place: int) -> None:
        """Launch on the current stream."""
        programs, n = self._shape
        self._run(
            programs, 1, 1, raw_stream(self.device), *self._before,
            source, target, n, 0.0, 0, 0, None, rows, sums, row, place, *self._after,
        )  # fmt: skip

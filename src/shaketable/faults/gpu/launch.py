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

    def __call__(self, programs: int, device: int, values: tuple[Any, ...]) -> None:
        """Launch on the current stream of the device, which is the current one. Tensors are given by their addresses."""
        self._run(programs, 1, 1, raw_stream(device), *self._head, *values, *self._constants)

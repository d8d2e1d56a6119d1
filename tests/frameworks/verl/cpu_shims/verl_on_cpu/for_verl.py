"""A platform called cpu, process groups on gloo, memory that is not pinned. verl imports this module when it is imported itself, in every process.

It is a module of its own because verl loads its entry points without calling them: importing is registering.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import verl.utils.distributed as distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """`torch.cpu`, with the questions about memory that verl asks a device."""
    device = types.ModuleType("cpu_as_a_device")
    vars(device).update(vars(torch.cpu))
    vars(device).update(
        get_device_name=lambda *_: "cpu",
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (1 << 30, 1 << 30),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        set_device=lambda *_: None,
    )
    return device


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU that Ray counts as GPUs."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


distributed.initialize_global_process_group_ray = partial(distributed.initialize_global_process_group_ray, backend="cpu:gloo")
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]

"""Takes the place of Ascend's `torch_npu`: importing it gives torch a device `npu`, which computes on the CPU (`device.cpp`).

It is no NPU: no number of an NPU comes out of it. It shows whether code asks for CUDA where it means an accelerator, reads a device's
memory as the host's, draws a device's random numbers, or needs float64, Triton or graphs there. It has the name and the place of the
real package so that transformers and accelerate, which look for that, use the device as they would use an NPU.

Rejected: PyTorch's own stand-in, OpenReg. It is in no package, is built from a checkout of torch of the same version, and covers fewer
operators than a small model needs; a tensor subclass in Python, which torch allows as a device since 2.10: every check that
asks for a plain tensor would take the other branch.
"""

import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import load

_NAME = "npu"
_BUILT = tempfile.mkdtemp(prefix="shaketable-npu-")  # anew each time: a build that is killed locks its folder for good
_device = load("npu_stand_in", [str(Path(__file__).with_name("device.cpp"))], build_directory=_BUILT, extra_cflags=["-O0"])


class _Npu(ModuleType):
    """What `torch.npu` has to have."""

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        pass

    def get_device_name(self, device=None):
        return "stand-in"

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self):
        return True

    def manual_seed_all(self, seed):
        _device.default_generator().manual_seed(seed)

    def get_rng_state(self, device=None):
        return _device.default_generator().get_state()

    def set_rng_state(self, state, device=None):
        _device.default_generator().set_state(state)

    def get_rng_state_all(self):
        return [self.get_rng_state()]

    def set_rng_state_all(self, states):
        self.set_rng_state(states[0])

    def _is_in_bad_fork(self):
        return False


def npu_fusion_attention(*args, **kwargs):
    """transformers imports it; flash attention is not here."""
    raise NotImplementedError("the stand-in has no flash attention")


torch.utils.rename_privateuse1_backend(_NAME)
_npu = _Npu(f"torch.{_NAME}")
_npu.random = _npu
torch._register_device_module(_NAME, _npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

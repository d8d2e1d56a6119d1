"""What the tests of tests/gpu share: the device, a step of training, and who may be skipped.

The device is CUDA. With SHAKETABLE_TEST_DEVICE=cpu the same tests run on a CPU, where they were written: what they say of the
engine is true there too, and only what needs CUDA's own graphs and streams is skipped (`needs_cuda`).

Bits are compared, so torch is told to use deterministic kernels; cuBLAS wants its workspace named before it is first used.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import functools

import pytest
import torch

from tests import tensors
from tests.inject import code_paths

DEVICE = os.environ.get("SHAKETABLE_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"
on_device = [pytest.mark.gpu, pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="no accelerator")]
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not ON_CUDA or not torch.cuda.is_available(), reason="no CUDA")]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

NOISE = "relative_gaussian:0.05"
LEVELS = [
    f"{NOISE}@module.linear",
    f"{NOISE}@module.linear,point=input",
    f"{NOISE}@module.linear,direction=both",
    f"{NOISE}@module.rmsnorm+linear,point=weight",
    f"{NOISE}@layer.all",
    f"{NOISE}@op.all",
    "dead_zone:0.05,scope=token@layer.all",
    "mxfp4@module.linear,point=weight+input",
]
RANDOM = [plan for plan in LEVELS if "gaussian" in plan]
every_level = pytest.mark.parametrize("plan", LEVELS)
random_levels = pytest.mark.parametrize("plan", RANDOM)


step = functools.partial(tensors.step, n=16)
deterministic = pytest.fixture(autouse=True)(code_paths.kernels_that_repeat)


def ids(n=16):
    """Two rows of tokens on the device."""
    return tensors.ids(n, DEVICE)


def settle():
    """Wait for the device: what it counts is in the ledger afterwards."""
    if ON_CUDA:
        torch.cuda.synchronize()

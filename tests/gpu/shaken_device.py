"""What the tests of tests/gpu share: the device, a step of training, and who may be skipped.

The device is CUDA. With SHAKETABLE_TEST_DEVICE=cpu the same tests run on a CPU, where they were written: what they say of the
engine is true there too, and only what needs CUDA's own graphs and streams is skipped (`needs_cuda`).

Bits are compared, so torch is told to use deterministic kernels; cuBLAS wants its workspace named before it is first used.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

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


def ids(n=16):
    """Two rows of tokens."""
    return torch.arange(2 * n, device=DEVICE).view(2, n) % 64


def step(model):
    """Loss and gradients of one training step."""
    model.zero_grad()
    loss = model(ids(), labels=ids()).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(a, b):
    """Bit for bit; a NaN would be no proof of anything, so there may be none."""
    assert all(x.isfinite().all() for x in (*a, *b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def settle():
    """Wait for the device: what it counts is in the ledger afterwards."""
    if ON_CUDA:
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def deterministic():
    """Kernels that give the same bits twice. Imported by every file that compares bits."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])

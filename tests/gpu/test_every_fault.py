"""Every generic test of every fault, on an accelerator.

Not a copy of them: the test functions of tests/faults/test_every_fault.py are collected here a second time, with a `gaussian`
that lives on the device and the device as the place where new tensors are made. A new fault, or a new law for all faults, is
tested here without a line. Below them, what can only be asked of two devices at once.
"""

import pytest
import torch

import tests.faults.test_every_fault as generic
from shaketable.faults import Draw, Format, make_fault
from shaketable.faults.rng import key_of
from tests.gpu.shaken_device import DEVICE, ON_CUDA, every_dtype, on_device

pytestmark = on_device
TESTS = {name: test for name, test in vars(generic).items() if name.startswith("test_") and "accelerator" not in name}
globals().update(TESTS)
on_cpu = generic.gaussian


@pytest.fixture(autouse=True)
def everything_on_the_device(monkeypatch):
    monkeypatch.setattr(generic, "gaussian", lambda *shape, dtype=torch.float32: _gaussian(*shape, dtype=dtype))
    with torch.device(DEVICE):
        yield


def _gaussian(*shape, dtype=torch.float32):
    with torch.device("cpu"):
        return on_cpu(*shape, dtype=dtype).to(DEVICE)


def test_the_generic_tests_are_here_and_on_the_device():
    assert len(TESTS) > 12
    assert generic.gaussian(2, 3).device.type == DEVICE
    assert torch.ones(2).device.type == DEVICE


FORMATS = [fault for fault in generic.FAULTS if isinstance(fault, Format) and not fault.random]


def hard_values(dtype):
    """All magnitudes a type has: every exponent, subnormals and zeros of both signs among them, 33 to a row."""
    raw = torch.arange(0, 2**16, 5, dtype=torch.int32, device="cpu")[: 33 * 397]
    small = raw.to(torch.int16).view(dtype) if dtype.itemsize == 2 else (raw << 16).view(torch.float32)
    return small.where(small.isfinite(), 0.0).view(397, 33)


@every_dtype
@pytest.mark.parametrize("fault", FORMATS, ids=lambda f: f.text())
def test_a_format_is_the_same_bits_on_both_devices(fault, dtype):
    for x in (hard_values(dtype), on_cpu_values(40, 300, dtype), on_cpu_values(3, 5, dtype)):
        assert generic.same(fault.apply(x.to(DEVICE), Draw(5)).cpu(), fault.apply(x, Draw(5)))


def on_cpu_values(rows, columns, dtype):
    with torch.device("cpu"):
        return (on_cpu(rows, columns) ** 3).to(dtype)


STEADY = [fault for fault in generic.FAULTS if fault.is_steady and not isinstance(fault, Format)]


@every_dtype
@pytest.mark.parametrize("fault", STEADY, ids=lambda f: f.text())
def test_a_steady_fault_is_the_same_on_both_devices(fault, dtype):
    x = on_cpu_values(40, 300, dtype)
    there, here = fault.apply(x.to(DEVICE), Draw(5)).cpu(), fault.apply(x, Draw(5))
    torch.testing.assert_close(there, here, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@every_dtype
def test_large_tensors_are_drawn_to_their_end(dtype):
    """Past 2^24 elements, with a tail that fills no block: each element still has its own noise."""
    n = (1 << 24) + 77 if ON_CUDA else (1 << 18) + 77
    x = torch.ones(n, dtype=dtype)
    y = make_fault({"kind": "relative_gaussian", "magnitude": 0.25}).apply(x, Draw(key_of("large")))
    tail = y[-4096:].double()
    assert tail.std().item() == pytest.approx(0.25, rel=0.1)
    assert abs(tail.mean().item() - 1) < 0.02
    assert (y[-77:] != 1).sum() > 70
    head = make_fault({"kind": "relative_gaussian", "magnitude": 0.25}).apply(x[:1000].clone(), Draw(key_of("large")))
    assert torch.equal(head, y[:1000])

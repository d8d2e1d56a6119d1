"""The fused noise, bias and gain: in the interpreter bit for bit what noise.py computes, on a GPU the same noise within rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shaketable.faults import Draw, make_fault
from shaketable.faults.gpu import dispatch
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.rng import plain_normals
from tests.faults.gpu.kernel_route import DEVICE, KEYS, ON_GPU, fused, kernels, plain, quick, tensors
from tests.tensors import same_numbers as same

pytestmark = kernels
SCALES = st.sampled_from([1e-5, 0.05, 1.0, 3.0])
EXACT = ("relative_gaussian", "absolute_gaussian", "systematic_bias", "gain")
IN_UNITS = ({"kind": "noise"}, {"kind": "rms_gaussian"}, {"kind": "bias"}, {"kind": "non_determinism", "mode": "inconsistent"})
SIZES = (1, 2, 31, 32, 33, 1024, 2047, 2048, 2049, 5000)


def alike(fast, wanted, x, reach):
    """The same bits in the interpreter; on a GPU, whose logarithm and sine are its own, within 2e-4 of `reach` and rounding."""
    if not ON_GPU:
        return same(fast, wanted)
    far = (fast.double() - wanted.double()).abs()
    slack = 2e-4 * reach + 4 * torch.finfo(x.dtype).eps * (wanted.double().abs() + x.double().abs()) + torch.finfo(x.dtype).tiny
    near = (far <= slack) | ~(fast.isfinite() & wanted.isfinite())
    return fast.dtype == wanted.dtype and bool(near.all()) and torch.equal(fast.isnan(), wanted.isnan())


@pytest.mark.parametrize("kind", EXACT)
@quick
@given(x=tensors(), scale=SCALES, key=KEYS)
def test_a_fault_is_the_same_by_both_routes(kind, x, scale, key):
    fault = make_fault({"kind": kind, "magnitude": scale})
    with fused() as did:
        fast = fault.apply(x, Draw(key))
    assert did == (["noise"] if "gaussian" in kind else ["shift"])
    with plain():
        assert alike(fast, fault.apply(x, Draw(key)), x, scale * x.double().abs() if kind == "relative_gaussian" else scale)


@pytest.mark.parametrize("fields", IN_UNITS, ids=lambda f: f["kind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_noise_in_units_of_the_tensor_agrees_within_rounding(fields, dtype):
    fault = make_fault({**fields, "magnitude": 2})
    x = torch.randn(31, 77, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    with fused() as did:
        fast = fault.apply(x, Draw(9))
    assert did[-1] in ("noise", "shift")
    assert did[0] == "moment"
    with plain():
        torch.testing.assert_close(fast, fault.apply(x, Draw(9)), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@quick
@given(x=tensors(), scale=SCALES, unit=st.floats(0.0078125, 100.0, width=32))
def test_a_bias_of_a_kept_reference_is_the_same_by_both_routes(x, scale, unit):
    fault, draw = make_fault({"kind": "bias", "magnitude": scale}), Draw(1, torch.tensor(unit))
    with fused() as did:
        fast = fault.apply(x, draw)
    assert did == ["shift"]
    with plain():
        assert alike(fast, fault.apply(x, draw), x, scale * unit)


@pytest.mark.parametrize("n", SIZES)
def test_the_normals_are_those_of_the_generator_at_every_size(n):
    """By far most of them to the last bits; where a GPU's logarithm is weak, near u = 1, to four digits."""
    key = 0xFEDCBA9876543210 + n
    with fused():
        z = gpu.noise(torch.zeros(n, device=DEVICE), 1.0, key, relative=False)
    off = (z.cpu() - plain_normals(n, Draw(key).normal_key, torch.device("cpu"))).abs()
    assert off.max() <= (2e-4 if ON_GPU else 0.0)
    assert (off <= 2e-6).double().mean() > 0.999 or n < 5000


@pytest.mark.parametrize("x", [torch.zeros(3, dtype=torch.float64), torch.zeros(0), torch.zeros(3, dtype=torch.int32)])
def test_what_the_kernels_do_not_know_is_left_to_plain_torch(x):
    x = x.to(DEVICE)
    assert not dispatch.fits(x)
    assert gpu.noise(x, 0.1, 1, relative=True) is gpu.shift(x, 0.1, gpu.GAIN) is gpu.moment(x, gpu.MEAN) is None
    assert gpu.top(x, finite=True) is gpu.coded(x, "mxfp4", "block", None) is None
    assert gpu.clipped(x, "dead_zone", 0.1, "tensor", 32) is None


def test_the_kernels_refuse_tensors_of_a_cpu_and_subclasses():
    class Odd(torch.Tensor):
        pass

    assert not dispatch.fits(torch.zeros(3))
    assert not dispatch.fits(torch.zeros(3, device=DEVICE).as_subclass(Odd))

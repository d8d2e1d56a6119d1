"""A tensor's maximum, mean, spread and size by kernel: exact, or right to the last bit but one, and the same every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shaketable.faults.clipping import top
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.noise import middle, size, spread
from tests.faults.gpu.kernel_route import DEVICE, HARD, NAN, fused, kernels, plain, quick, tensors
from tests.tensors import same_numbers as same

pytestmark = kernels
MOMENTS = {"middle": middle, "spread": spread, "size": size}
each_moment = pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)


def oracle(x, moment):
    """In float64, in two passes."""
    w = x.double()[x.isfinite()]
    if w.numel() == 0:
        return 0.0
    squares = w if moment is size else w - w.mean()
    return float(w.mean() if moment is middle else squares.square().mean().sqrt())


def near(x, moment):
    """Within a float32's rounding of it; a mean, of the values that were summed."""
    return pytest.approx(oracle(x, moment), rel=1e-6, abs=max(1e-6 * oracle(x, size) if moment is middle else 0.0, 2e-45))


@quick
@given(x=tensors())
def test_the_largest_finite_magnitude_is_exact(x):
    with fused() as did:
        fast = top(x, "tensor", 32)
    assert did == ["top"]
    with plain():
        assert same(fast, top(x, "tensor", 32))


@quick
@given(x=tensors())
def test_the_largest_magnitude_is_nan_where_there_is_one(x):
    with fused():
        assert same(gpu.top(x, finite=False), x.float().abs().amax())


@each_moment
@quick
@given(x=tensors())
def test_a_moment_is_that_of_float64(moment, x):
    with fused() as did:
        fast = moment(x)
    assert did == ["moment"]
    assert (fast.dtype, fast.dim(), fast.device) == (torch.float32, 0, x.device)
    assert float(fast) == near(x, moment)


@quick
@given(values=st.permutations(HARD))
def test_what_is_not_finite_does_not_count(values):
    x = torch.tensor(values, device=DEVICE)
    with fused():
        for moment in MOMENTS.values():
            assert float(moment(x)) == near(x, moment)
            assert float(moment(torch.full((40,), NAN, device=DEVICE))) == 0


def test_a_small_spread_around_a_large_mean():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 4096.0
    with fused():
        assert float(spread(x)) == pytest.approx(oracle(x, spread), rel=1e-6)
        assert float(spread(torch.full((5000,), 0.1, device=DEVICE))) < 1e-7


def test_the_same_tensor_gives_the_same_bits_every_time():
    x = torch.randn(50_001, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with fused():
        for moment in MOMENTS.values():
            assert len({float(moment(x)) for _ in range(4)}) == 1


def test_several_blocks_to_a_program(monkeypatch):
    """As for tensors too large for the interpreter: a share of several blocks, and programs that are not full."""
    monkeypatch.setattr("shaketable.faults.gpu.dispatch._share", lambda n: (4, -(-n // (4 * 2048))))
    x = torch.randn(6 * 2048 + 5, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    x[-1] = -9.5
    with fused():
        assert float(top(x, "tensor", 32)) == 9.5
        for moment in MOMENTS.values():
            assert float(moment(x)) == pytest.approx(oracle(x, moment), rel=1e-5)

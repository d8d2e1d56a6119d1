"""The fused dead zone and saturation, forward and backward: bit for bit what clipping.py computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shaketable.faults import Draw, make_fault
from tests.faults.gpu.kernel_route import DEVICE, LONG_ROWS, fused, kernels, plain, quick, tensors
from tests.tensors import same_numbers as same

pytestmark = kernels
FAULTS = [("dead_zone", s) for s in ("tensor", "token", "block")]
FAULTS += [("saturation", s) for s in ("tensor", "token", "block", "absolute")]
every_fault = pytest.mark.parametrize(("kind", "scope"), FAULTS)
MAGNITUDES = st.sampled_from([1e-3, 0.1, 0.3, 0.9, 1.0])
BLOCKS = st.sampled_from([1, 2, 5, 16, 32, 33, 100, 2000, 2**31 - 1])


def both_routes(fault, x, g=None):
    """The faulty tensor or, with `g`, the gradient, from the kernel and from plain torch."""
    hit = (lambda: fault.apply(x, Draw(1))) if g is None else (lambda: fault.gradient(g, x, Draw(1)))
    with fused() as did:
        fast = hit()
    assert did[-1:] == ["clipped"]
    with plain():
        return fast, hit()


@every_fault
@quick
@given(x=tensors(), magnitude=MAGNITUDES, block=BLOCKS)
def test_clipping_is_the_same_bits_by_both_routes(kind, scope, x, magnitude, block):
    fault = make_fault({"kind": kind, "magnitude": magnitude, "scope": scope, "block": block})
    fast, wanted = both_routes(fault, x)
    assert same(fast, wanted)


@every_fault
@quick
@given(x=tensors(), magnitude=MAGNITUDES, block=BLOCKS, seed=st.integers(0, 99))
def test_its_gradient_is_the_same_bits_by_both_routes(kind, scope, x, magnitude, block, seed):
    fault = make_fault({"kind": kind, "magnitude": magnitude, "scope": scope, "block": block})
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype).to(DEVICE)
    fast, wanted = both_routes(fault, x, g)
    assert same(fast, wanted)


@pytest.mark.parametrize("rows", LONG_ROWS, ids=str)
@pytest.mark.parametrize("kind", ["dead_zone", "saturation"])
def test_rows_of_one_tile_of_several_and_of_two_passes_are_clipped_the_same(kind, rows):
    x = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(DEVICE)
    x[:, -1], x[0, 0] = 9.0, float("inf")
    fault = make_fault({"kind": kind, "magnitude": 0.1, "scope": "token"})
    assert same(*both_routes(fault, x))
    assert same(*both_routes(fault, x, torch.randn(rows, device=DEVICE)))


def test_a_gradient_may_be_of_another_type_than_its_tensor():
    x, g = torch.randn(5, 40, device=DEVICE), torch.randn(5, 40, device=DEVICE).to(torch.bfloat16)
    for kind, scope in FAULTS:
        assert same(*both_routes(make_fault({"kind": kind, "magnitude": 0.2, "scope": scope}), x, g))

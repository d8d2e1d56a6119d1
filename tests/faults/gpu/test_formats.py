"""The fused number formats: bit for bit what formats.py computes, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from shaketable.faults import Draw, make_fault
from shaketable.faults.gpu.tiling import cut
from tests.faults.gpu.kernel_route import (
    DEVICE,
    KEYS,
    LONG_ROWS,
    every_number,
    fused,
    kernels,
    plain,
    quick,
    tensors,
)
from tests.tensors import same_numbers as same

pytestmark = kernels
SCOPES = ("tensor", "token", "block", "none")
EVEN = [{"kind": kind} for kind in ("mxfp4", "nvfp4")] + [
    {"kind": kind, "scope": scope} for kind in ("fp8_e4m3", "fp8_e5m2") for scope in SCOPES
]
FORMATS = [make_fault({**fields, "rounding": rounding}) for fields in EVEN for rounding in ("even", "stochastic")]
every_format = pytest.mark.parametrize("fault", FORMATS, ids=lambda f: f.text())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def both_routes(fault, x, key):
    with fused() as did:
        fast = fault.apply(x, Draw(key))
    assert did[-1:] == ["coded"]
    with plain():
        return fast, fault.apply(x, Draw(key))


@every_format
@quick
@given(x=tensors(), key=KEYS)
def test_a_format_is_the_same_bits_by_both_routes(fault, x, key):
    fast, wanted = both_routes(fault, x, key)
    assert same(fast, wanted)


@every_dtype
@every_format
def test_every_number_of_a_type_is_coded_the_same(fault, dtype):
    """In rows that no block divides, so that most blocks hold numbers of one size and some hold the ends of the type."""
    x = every_number(dtype)
    x = x.where(x.isfinite(), 0.0)[: x.numel() // 65 * 65].view(-1, 65)
    fast, wanted = both_routes(fault, x, 7)
    assert same(fast, wanted)


@pytest.mark.parametrize("rows", LONG_ROWS, ids=str)
def test_rows_of_one_tile_of_several_and_of_two_passes_are_coded_the_same(rows):
    x = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(DEVICE)
    x[:, -1] = 9.0
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        for rounding in ("even", "stochastic"):
            assert same(*both_routes(make_fault({"kind": kind, "scope": "token", "rounding": rounding}), x, 11))


@pytest.mark.parametrize("fault", [f for f in FORMATS if f.rounding == "stochastic"], ids=lambda f: f.text())
def test_stochastic_rounding_follows_its_key(fault):
    x = torch.linspace(0.1, 1.0, 4 * 96, device=DEVICE).view(4, 96)
    with fused():
        first, again, other = (fault.apply(x, Draw(key)) for key in (5, 5, 6))
    assert same(first, again)
    assert not same(first, other)


def test_a_segment_that_is_held_has_few_idle_lanes_and_few_registers():
    for length in (*range(1, 600), 1000, 1537, 8193, 12289, 16385, 20480):
        parts = cut(4096, length, length)
        lanes, threads = parts.width * parts.steps, 32 * parts.warps
        assert length <= lanes < 1.25 * length + 64
        assert lanes * parts.group <= 72 * threads
        assert threads <= 512

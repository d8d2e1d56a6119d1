"""Faults of reduced types are computed in float32 and rounded once: the type of the tensor makes no other error."""

import pytest
import torch

from shaketable.faults import Draw, make_fault

KINDS = {
    "gain": lambda x: x * 1.1,
    "systematic_bias": lambda x: x + x.sign() * 0.1,
    "bias": lambda x: x + 0.1 * (x - x.mean()).square().mean().sqrt(),
    "dead_zone": lambda x: x.where(x.abs() >= 0.1 * x.abs().max(), 0.0),
    "saturation": lambda x: x.clamp(-0.1 * x.abs().max(), 0.1 * x.abs().max()),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_rounded_once(kind, dtype):
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = make_fault({"kind": kind, "magnitude": 0.1}).apply(x, Draw(0))
    assert found.dtype == dtype
    assert torch.equal(found, KINDS[kind](x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_rounded_once_too(dtype):
    x, draw = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).to(dtype), Draw(7)
    z, w = draw.normal(x), x.float()
    relative, absolute = (make_fault({"kind": k, "magnitude": 0.1}) for k in ("relative_gaussian", "absolute_gaussian"))
    assert torch.equal(relative.apply(x, draw), (w + w * (z * 0.1)).to(dtype))
    assert torch.equal(absolute.apply(x, draw), (w + z * 0.1).to(dtype))

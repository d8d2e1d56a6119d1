"""Names of faults from synthetic patterns, and from the faults themselves."""

import math

import pytest
import torch

import shaketable as st
from shaketable.numerics.classify import fault_class, unstable_class

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def healthy(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, 24, 40, generator=generator) * 2).to(dtype)


def named(clean, got):
    """What replay would hand over: the true values as the interval, where the results are others."""
    outside = ~(got == clean)
    return fault_class(got, clean[outside], clean[outside], outside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", ["gain:0.25", "bias:0.4", "dead_zone:0.2", "saturation:0.2", "truncation:2", "stuck_bit:2"])
def test_planted_faults_get_their_own_name(plan, dtype):
    clean, device = healthy(dtype), torch.nn.Sequential(torch.nn.Identity())
    with st.inject(device, f"{plan}@module.Identity"):
        got = device(clean)
    assert not torch.equal(got, clean)
    assert named(clean, got) == plan.split(":")[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_enough(value):
    clean = healthy()
    got = clean * 1.25
    got[0, 3, 5] = value
    assert named(clean, got) == "not_finite"


def test_a_single_value_zeroed_clamped_or_wrong():
    clean = healthy()
    place = (0, 3, 5)
    zeroed, other = clean.clone(), clean.clone()
    zeroed[place], other[place] = 0, -clean[place] * 7
    assert named(clean, zeroed) == "dead_zone"
    top = tuple(i.item() for i in torch.unravel_index(clean.abs().argmax(), clean.shape))
    clamped = clean.clone()
    rest = clean.abs().flatten().topk(2).values[1]
    clamped[top] = clean[top].sign() * rest
    assert named(clean, clamped) == "saturation"
    assert named(clean, other) not in ("dead_zone", "saturation")


@pytest.mark.parametrize(("share", "name"), [(0.001, "spike"), (0.04, "spike"), (0.06, "noise"), (1.0, "noise")])
def test_what_changes_from_call_to_call(share, name):
    a = torch.zeros(100, 100)
    b = a.clone()
    b.view(-1)[: int(share * a.numel())] = 1
    assert unstable_class(a, b) == name

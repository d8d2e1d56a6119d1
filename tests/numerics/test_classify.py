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


def with_lanes(clean, change, lanes=slice(None)):
    got = clean.clone()
    got[..., lanes] = change(clean[..., lanes].float()).to(clean.dtype)
    return got


CHANGES = {
    "dead_zone": lambda y: torch.where(y.abs() < 2, 0.0, y),
    "saturation": lambda y: y.clamp(-1.5, 1.5),
    "gain": lambda y: y * 1.25,
    "bias": lambda y: y + 0.75,
    "wrong_values": lambda y: y.flip(1) + 0.001,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lanes", [slice(None), [3, 17]], ids=["all lanes", "two lanes"])
@pytest.mark.parametrize("name", CHANGES)
def test_each_pattern_has_its_name(name, lanes, dtype):
    clean = healthy(dtype)
    assert named(clean, with_lanes(clean, CHANGES[name], lanes)) == name


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


def test_clamping_by_token_is_saturation():
    clean = healthy()
    limit = clean.abs().amax(-1, keepdim=True) * 0.5
    assert named(clean, clean.clamp(-limit, limit)) == "saturation"


def test_lanes_that_are_healthy_do_not_hide_a_pattern_of_bits():
    clean = healthy()
    got = clean.clone()
    got[..., 7] = (clean[..., 7].contiguous().view(torch.int32) | (1 << 20)).view(torch.float32)
    assert named(clean, got) == "stuck_bit"
    got = clean.clone()
    got[..., 7] = (clean[..., 7].contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert named(clean, got) == "truncation"


def test_a_result_of_no_dimension():
    clean = torch.tensor(3.0)
    assert named(clean, torch.tensor(4.0)) in ("wrong_values", "gain", "bias")


@pytest.mark.parametrize(("share", "name"), [(0.001, "spike"), (0.04, "spike"), (0.06, "noise"), (1.0, "noise")])
def test_what_changes_from_call_to_call(share, name):
    a = torch.zeros(100, 100)
    b = a.clone()
    b.view(-1)[: int(share * a.numel())] = 1
    assert unstable_class(a, b) == name

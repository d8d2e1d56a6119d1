"""What torch's functions return on this machine is inside of their bounds, and clearly wrong results are not."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import special

from shaketable.capture.recorder import function_name
from shaketable.numerics.intervals import Precision
from shaketable.numerics.operators import BOUNDED, Call, rounded_once
from shaketable.sites.nested_tensors import map_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT = Precision()


def host_call(func, args, kwargs, dtype, precision=EXACT):
    """A recorded call with copies of its arguments."""
    args, kwargs = map_tensors(args, torch.clone), map_tensors(kwargs, torch.clone)
    return Call(func, args, kwargs, dtype, precision)


def allowed(func, args, kwargs, dtype, precision=EXACT):
    return BOUNDED[function_name(func)](host_call(func, args, kwargs, dtype, precision))


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def nasty(dtype, positive=False):
    """Zeros, tiny and large values of either sign."""
    largest = 6e4 if dtype == torch.float16 else 1e30
    sizes = [0.0, 1e-40, 1e-30, 1e-7, 1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 20.0, 80.0, 100.0, 1000.0, largest]
    values = torch.tensor(sizes if positive else [s * v for v in sizes for s in (1, -1)])
    return values.to(dtype)


def elementwise(func, positive=False, **kwargs):
    def cases(dtype):
        x = draw(200, scale=3.0)
        yield func, ((x.abs() + 0.1 if positive else x).to(dtype),), kwargs
        yield func, (nasty(dtype, positive),), kwargs

    return cases


def of_linear(dtype):
    x, w, b = draw(2, 5, 48).to(dtype), draw(33, 48, seed=1).to(dtype), draw(33, seed=2).to(dtype)
    yield F.linear, (x, w), {}
    yield F.linear, (x, w, b), {}
    yield F.linear, (x,), {"weight": w, "bias": b}
    yield F.linear, (x * 1e-2, w), {}


def of_matmul(func):
    def cases(dtype):
        batch = (3,) if func is torch.bmm else () if func is torch.mm else (2, 3)
        x, w = draw(*batch, 7, 40).to(dtype), draw(*batch, 40, 9, seed=1).to(dtype)
        yield func, (x, w), {}
        yield func, (x * 100, w * 0), {}
        if func is not torch.Tensor.__matmul__:
            yield func, (x,), {"other" if func is torch.matmul else "mat2": w}

    return cases


def of_addmm(func):
    def cases(dtype):
        batch = (3,) if func is torch.baddbmm else ()
        added, x, w = draw(*batch, 7, 9).to(dtype), draw(*batch, 7, 40, seed=1).to(dtype), draw(*batch, 40, 9, seed=2).to(dtype)
        yield func, (added, x, w), {}
        yield func, (added * 50, x, w), {"beta": 0.5, "alpha": 2.0}
        yield func, (torch.full_like(added, math.nan), x, w), {"beta": 0, "alpha": 0.125}

    return cases


def of_grouped(dtype):
    from torch.nn.functional import grouped_mm

    if dtype == torch.bfloat16:
        x, w = draw(24, 16).to(dtype), draw(3, 16, 8, seed=1).to(dtype)
        ends = torch.tensor([8, 8, 24], dtype=torch.int32)
        yield grouped_mm, (x, w), {"offs": ends}


def of_softmax(dtype):
    x = draw(4, 3, 30, scale=4.0).to(dtype)
    masked = x.clone()
    masked[..., 10:] = -math.inf
    yield F.softmax, (x,), {"dim": -1}
    yield torch.softmax, (x, 1), {}
    yield F.softmax, (masked,), {"dim": -1}
    yield F.softmax, (x * 20,), {"dim": -1, "dtype": torch.float32}
    masked[0, 0] = -math.inf
    yield F.softmax, (masked,), {"dim": -1}
    yield F.softmax, (torch.full_like(x, torch.finfo(dtype).min),), {"dim": -1}


def of_attention(dtype):
    q, k, v = (draw(2, 4, 12, 16, seed=s).to(dtype) for s in range(3))
    seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(3)) < 0.6
    blind = seen.clone()
    blind[0, :, 3] = False
    sdpa = F.scaled_dot_product_attention
    yield sdpa, (q, k, v), {}
    yield sdpa, (q, k, v), {"is_causal": True}
    yield sdpa, (q, k, v, None, 0.0, True), {}
    yield sdpa, (q[:, :, :5], k, v), {"is_causal": True, "scale": 0.7}
    yield sdpa, (q, k, v), {"attn_mask": seen}
    yield sdpa, (q, k, v), {"attn_mask": blind}
    yield sdpa, (q, k, v), {"attn_mask": torch.zeros(seen.shape).masked_fill(~blind, -math.inf).to(dtype)}
    yield sdpa, (q, k, v), {"attn_mask": torch.zeros(seen.shape).masked_fill(~blind, torch.finfo(dtype).min).to(dtype)}
    yield sdpa, (q, k, v), {"attn_mask": draw(1, 4, 12, 12, seed=4).to(dtype), "scale": 0.1}
    yield sdpa, (q * 10, k * 3, v), {"is_causal": True}
    yield sdpa, (q * 0, k, v * 100), {}
    yield sdpa, (q, k[:, :2], v[:, :2]), {"is_causal": True, "enable_gqa": True}
    yield sdpa, (q[:, :, -1:], k[:, :1], v[:, :1]), {"enable_gqa": True, "attn_mask": seen[:, :, -1:]}
    yield sdpa, (q, k, v[..., :8]), {}


def of_pow(func):
    def cases(dtype):
        x = draw(200).abs().to(dtype) + 0.1
        for exponent in (2, 3, 0.5, -0.5, 2.5):
            yield func, (x, exponent), {}
        yield func, (x, x), {}
        yield func, (nasty(dtype), 2), {}

    return cases


def of_reduction(func):
    def cases(dtype):
        x = draw(6, 5, 64).to(dtype)
        yield func, (x,), {}
        yield func, (x, -1), {}
        yield func, (x, -1, True), {}
        yield func, (x,), {"dim": (0, 2), "keepdim": True}
        yield func, (x * 0.01,), {"dim": 1, "dtype": torch.float32}

    return cases


def of_index_add(func):
    def cases(dtype):
        base, rows = draw(8, 5).to(dtype), draw(4, 5, seed=1).to(dtype)
        yield func, (base, 0, torch.tensor([1, 7, 3, 0]), rows), {}
        yield func, (base, 0, torch.tensor([1, 1, 3, 1]), rows), {}
        yield func, (base.T.contiguous(), 1, torch.tensor([2, 5, 2, 0])), {"source": rows.T.contiguous()}
        yield func, (base, 0, torch.tensor([1, 7, 3, 0]), rows), {"alpha": 2.0}

    return cases


def of_layer_norm(dtype):
    x, w, b = draw(2, 7, 24).to(dtype), draw(24, seed=1).to(dtype), draw(24, seed=2).to(dtype)
    yield F.layer_norm, (x * 3 + 1, (24,), w, b, 1e-5), {}
    yield F.layer_norm, (x, (7, 24)), {}
    yield F.layer_norm, (x, (24,)), {"weight": w, "eps": 1e-3}


def of_rms_norm(dtype):
    x, w = draw(2, 7, 24).to(dtype), draw(24, seed=1).to(dtype)
    yield F.rms_norm, (x, (24,), w, 1e-6), {}
    yield F.rms_norm, (x, (24,)), {}
    yield F.rms_norm, (x, (24,)), {"weight": w, "eps": 1e-3}


def of_conv1d(dtype):
    x, b = draw(2, 24, 7).to(dtype), draw(6).to(dtype)
    yield F.conv1d, (x, draw(24, 1, 4, seed=6).to(dtype), None, 1, 3, 1, 24), {}
    yield F.conv1d, (x, draw(6, 24, 3, seed=6).to(dtype)), {"bias": b, "padding": 2}


CASES = {
    "linear": of_linear,
    "matmul": of_matmul(torch.matmul),
    "__matmul__": of_matmul(torch.Tensor.__matmul__),
    "mm": of_matmul(torch.mm),
    "bmm": of_matmul(torch.bmm),
    "addmm": of_addmm(torch.addmm),
    "baddbmm": of_addmm(torch.baddbmm),
    "grouped_mm": of_grouped,
    "softmax": of_softmax,
    "scaled_dot_product_attention": of_attention,
    "silu": elementwise(F.silu),
    "gelu": elementwise(F.gelu),
    "gelu tanh": elementwise(F.gelu, approximate="tanh"),
    "tanh": elementwise(torch.tanh),
    "sigmoid": elementwise(torch.sigmoid),
    "rsqrt": elementwise(torch.rsqrt, positive=True),
    "sqrt": elementwise(torch.sqrt, positive=True),
    "reciprocal": elementwise(torch.reciprocal),
    "cos": elementwise(torch.cos),
    "sin": elementwise(torch.sin),
    "exp": elementwise(torch.exp),
    "log": elementwise(torch.log, positive=True),
    "pow": of_pow(torch.pow),
    "__pow__": of_pow(torch.Tensor.__pow__),
    "square": elementwise(torch.square),
    "mean": of_reduction(torch.mean),
    "sum": of_reduction(torch.sum),
    "index_add": of_index_add(torch.index_add),
    "index_add_": of_index_add(torch.Tensor.index_add_),
    "layer_norm": of_layer_norm,
    "rms_norm": of_rms_norm,
    "conv1d": of_conv1d,
}
ALIASES = {"_softmax": "softmax", "_grouped_mm": "grouped_mm", "grouped_mm_fallback": "grouped_mm"}
LOOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Functions whose reduced-precision results have a bound wider than their rounding."""
STEPS = {torch.float32: 1e-3, torch.bfloat16: 3 * 2.0**-7, torch.float16: 3 * 2.0**-10}
"""Clearly wrong: a thousandth in float32, three units in the last place elsewhere."""
WIDE = ("softmax", "rsqrt", "scaled_dot_product_attention", "addmm", "baddbmm", "index_add", "index_add_", "pow", "__pow__")


def test_every_bounded_function_is_tried():
    assert {name.split()[0] for name in CASES} | set(ALIASES) == set(BOUNDED)
    assert all(BOUNDED[alias] is BOUNDED[name] for alias, name in ALIASES.items())


def run(func, args, kwargs):
    return func(*map_tensors(args, torch.clone), **map_tensors(kwargs, torch.clone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_torch_returns_is_inside(name, dtype):
    for number, (func, args, kwargs) in enumerate(CASES[name](dtype)):
        got = run(func, args, kwargs)
        outside = allowed(func, args, kwargs, got.dtype).outside(got)
        assert not outside.any(), f"case {number}: {int(outside.sum())} of {got.numel()} outside, {got[outside][:4]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_clearly_wrong_results_are_outside(name, dtype):
    for number, (func, args, kwargs) in enumerate(CASES[name](dtype)):
        got = run(func, args, kwargs)
        expected = allowed(func, args, kwargs, got.dtype)
        by = (LOOSE if name in WIDE else STEPS)[got.dtype]
        sized = torch.isfinite(got * 2) & (got.abs() > 1e-2 * got.abs().nan_to_num(0, 0, 0).max().clamp(1e-5, 1.0))
        if not sized.any():
            continue
        for wrong in (got * (1 + by), got * (1 - by)):
            seen = expected.outside(wrong)[sized].double().mean()
            least = 0.4 if name in ("scaled_dot_product_attention", "sum", "mean", "index_add", "index_add_") else 0.75
            assert seen > least, f"case {number}: only {seen:.2f} of the wrong values are seen"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_small_input_of_a_norm_without_an_eps_may_be_divided_by_that_of_either_dtype(dtype):
    x = (draw(2, 7, 24) * 0.01).to(dtype)
    got = F.rms_norm(x, (24,))
    bound = allowed(F.rms_norm, (x, (24,)), {}, dtype)
    assert not bound.outside(got).any()
    got.view(-1)[got.abs().argmax()] *= 1.25
    assert int(bound.outside(got).sum()) == 1


# ---- oracles that are not torch


@pytest.mark.parametrize(
    ("name", "func", "oracle"),
    [
        ("silu", F.silu, lambda x: x * special.expit(x)),
        ("gelu", F.gelu, lambda x: x * special.ndtr(x)),
        ("tanh", torch.tanh, np.tanh),
        ("sigmoid", torch.sigmoid, special.expit),
        ("exp", torch.exp, np.exp),
        ("cos", torch.cos, np.cos),
        ("sin", torch.sin, np.sin),
        ("softmax", torch.softmax, lambda x: special.softmax(x, -1)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_true_value_rounded_is_inside(name, func, oracle, dtype):
    x = draw(20, 50, scale=3.0).to(dtype)
    got = torch.from_numpy(oracle(x.double().numpy())).to(dtype)
    args = (x, -1) if name == "softmax" else (x,)
    assert not allowed(func, args, {}, dtype).outside(got).any()


def plain_attention(q, k, v, mask=None, scale=None):
    """Attention in longdouble, head by head and query by query."""
    q, k, v = (t.double().numpy().astype(np.longdouble) for t in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]), np.longdouble)
    for b, h, i in np.ndindex(*q.shape[:3]):
        group = h // (q.shape[1] // k.shape[1])
        scores = k[b, group] @ q[b, h, i] * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if mask is None else scores + np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[b, h, i]
        p = np.exp(scores - scores.max())
        out[b, h, i] = (p / p.sum()) @ v[b, group]
    return torch.from_numpy(out.astype(np.float64))


@settings(max_examples=25)
@given(
    seed=some.integers(0, 2**31),
    groups=some.sampled_from([(4, 4), (4, 2), (4, 1), (3, 3)]),
    lengths=some.sampled_from([(6, 6), (1, 9), (5, 3)]),
    kind=some.sampled_from(["none", "causal", "float"]),
    scale=some.sampled_from([None, 0.05, 1.0, -0.5]),
    size=some.sampled_from([0.1, 1.0, 6.0]),
    dtype=some.sampled_from(DTYPES),
)
def test_attention_is_what_its_formula_says(seed, groups, lengths, kind, scale, size, dtype):
    (heads, shared), (queries, keys) = groups, lengths
    q = draw(1, heads, queries, 8, seed=seed, scale=size).to(dtype)
    k, v = draw(1, shared, keys, 8, seed=seed + 1).to(dtype), draw(1, shared, keys, 8, seed=seed + 2).to(dtype)
    mask, kwargs = None, {"scale": scale, "enable_gqa": heads != shared}
    if kind == "causal":
        mask, kwargs["is_causal"] = np.where(np.tri(queries, keys, dtype=bool), 0, -np.inf), True
    elif kind == "float":
        kwargs["attn_mask"] = draw(1, 1, queries, keys, seed=seed + 3).to(dtype)
        mask = kwargs["attn_mask"].double().numpy()
    true = plain_attention(q, k, v, mask, scale)
    bound = allowed(F.scaled_dot_product_attention, (q, k, v), kwargs, dtype)
    assert torch.allclose(bound.value, true, rtol=1e-5, atol=1e-6)
    assert not bound.outside(true.to(dtype)).any()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_what_a_query_that_sees_nothing_gets_is_not_judged(kind):
    q, k, v = (draw(1, 1, 4, 8, seed=s) for s in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(4, 4).masked_fill(~mask, torch.finfo(torch.float32).min)
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    bound = allowed(F.scaled_dot_product_attention, (q, k, v), {"attn_mask": mask}, torch.float32)
    assert not bound.outside(got).any()
    got += 1
    assert bound.outside(got)[0, 0].all(1).tolist() == [True, True, False, True]


# ---- functions that are rounded once


def judged(func, args, kwargs=None):
    kwargs = kwargs or {}
    got = run(func, args, kwargs)
    made = args[0] if got is None else got
    return rounded_once(host_call(func, args, kwargs, made.dtype), function_name(func)), made


def every(dtype):
    """Every finite value of a 16-bit dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("number", [0.1, 1 / 3, 8**-0.5, 1e-5, 50.0])
@pytest.mark.parametrize("func", [torch.mul, torch.add, torch.sub, torch.div, torch.rsub, torch.Tensor.__rtruediv__])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_number_may_be_rounded_before_it_meets_a_reduced_dtype(dtype, func, number):
    x = every(dtype)
    expected, got = judged(func, (x, number))
    assert not expected.outside(got).any()
    rounded = func(x, torch.tensor(number, dtype=dtype))
    assert func is torch.Tensor.__rtruediv__ or not expected.outside(rounded).any()
    usual = (got.abs() > 1e-3) & (got.abs() < 1e3)
    assert expected.outside(got * (1 + 6 * torch.finfo(dtype).eps))[usual].double().mean() > 0.9


def test_a_division_may_be_a_product_with_the_inverse():
    x = draw(2000)
    expected, got = judged(torch.div, (x, 3.0))
    inverse = x * torch.tensor(1 / 3, dtype=torch.float32)
    assert (inverse != got).any(), "the test needs values where the two differ"
    assert not expected.outside(inverse).any()
    assert expected.outside(got * (1 + 2.0**-22)).double().mean() > 0.9


def test_whole_numbers_are_computed_as_whole_numbers():
    """A float64 has no 2⁵³ + 1: by way of one, a wrong index would be allowed."""
    x = torch.tensor([2**53 + 1, 5])
    found = rounded_once(host_call(torch.add, (x, 0), {}, torch.int64), "add")
    assert not found.outside(x).any()
    assert found.outside(x - 1).tolist() == [True, True]

"""What holds for every fault of the registry. A new fault in `KINDS` is tested without a line here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from shaketable.faults import KINDS, Draw, FaultBase, Format, MagnitudeFault, make_fault
from shaketable.faults.rng import key_of
from shaketable.plan import Plan
from tests.tensors import bits
from tests.tensors import same_bits as same

UNUSUAL: dict[str, dict[str, Any]] = {
    "stuck_bit": {"magnitude": 2},
    "truncation": {"magnitude": 3},
    "non_determinism": {"magnitude": 2},
    "spike": {"magnitude": 8, "rate": 0.05},
    "bit_flip": {"magnitude": 0.1, "bit": 3},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""By how much a measured magnitude may be off because values are rounded to the type."""


def sample(kind: str, **more: Any) -> FaultBase:
    """A fault of that kind with fields that make it do something."""
    usual = {"magnitude": 0.1} if "magnitude" in KINDS[kind].model_fields else {}
    return make_fault({"kind": kind, **UNUSUAL.get(kind, usual), **more})


def choices(annotation: Any) -> list[str]:
    """The strings a field may take: those of its Literals."""
    if get_origin(annotation) is Literal:
        return [v for v in get_args(annotation) if isinstance(v, str)]
    return [v for a in get_args(annotation) for v in choices(a)]


def samples() -> Iterator[FaultBase]:
    """Every kind with its defaults, then with every other value of every mode, scope and rounding."""
    for kind, cls in KINDS.items():
        yield sample(kind)
        for name, field in cls.model_fields.items():
            yield from (sample(kind, **{name: v}) for v in choices(field.annotation) if v != field.default)


FAULTS = list(samples())
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.text())
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def spaced(x: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor."""
    return x.repeat_interleave(2, -1)[..., ::2]


LAYOUTS = {
    "contiguous": lambda v: v.clone(),
    "transposed": lambda v: v.t().contiguous().t(),
    "slice": lambda v: torch.cat([v, v])[: v.shape[0], 1:-1],
    "spaced": spaced,
    "1-D": lambda v: spaced(v.flatten()),
    "3-D": lambda v: v.view(4, 6, 40).permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "no rows": lambda v: v[:0],
    "no columns": lambda v: v[:, :0],
    "nothing": lambda v: v.flatten()[:0],
    "scalar": lambda v: v[0, 0],
}


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same standard normals at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@every_fault
def test_layout_does_not_matter_and_the_input_stays(fault, dtype, layout):
    x = LAYOUTS[layout]((gaussian(24, 40) ** 5).to(dtype))
    kept = x.clone(memory_format=torch.contiguous_format)
    y = fault.apply(x, Draw(5))
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert same(y, fault.apply(kept.clone(), Draw(5)))
    assert same(x, kept)
    assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@every_dtype
@every_fault
def test_a_draw_decides_every_bit(fault, dtype):
    x = gaussian(24, 40, dtype=dtype)
    first, again, other = (fault.apply(x, Draw(key_of(k))) for k in (1, 1, 2))
    assert same(first, again)
    assert not same(first, x)
    assert same(first, other) == fault.is_steady
    assert not (fault.random and fault.is_steady)


@every_fault
def test_magnitude_zero_is_off(fault):
    assert not fault.is_off
    if isinstance(fault, MagnitudeFault):
        assert fault.with_magnitude(0).is_off
        assert not fault.with_magnitude(0).with_magnitude(fault.magnitude).is_off
        assert fault.asked() == fault.magnitude
    else:
        assert fault.asked() is None


@every_fault
def test_gradient_is_that_of_what_is_computed(fault):
    """Own gradients equal autograd's through `apply` in float64; the others are straight-through.

    The upstream gradient sums to zero, which takes a mean that autograd does not hold fixed out of the comparison.
    """
    x, g = gaussian(24, 40).double(), gaussian(48, 40)[24:].double()
    g = g - g.mean()
    mine = fault.gradient(g, x if fault.saves_input else None, Draw(5))
    straight = type(fault).gradient is FaultBase.gradient or getattr(fault, "mode", "") == "inconsistent"
    if straight:
        assert torch.equal(mine, g)
        return
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(fault.apply(leaf, Draw(5)), leaf, g)
    torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-9)
    assert not torch.equal(mine, g)


@every_dtype
@every_fault
def test_measured_magnitude_is_the_one_asked_for(fault, dtype):
    x = gaussian(64, 256, dtype=dtype)
    draws = [Draw(key_of("magnitude", i)) for i in range(1 if fault.is_steady else 60)]
    found = [fault.read_back(x, fault.apply(x, d)) for d in draws]
    found = [None if f is None else float(f) for f in found]
    if fault.asked() is None:
        assert found == [None] * len(found)
        return
    error = 4 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    assert statistics.fmean(found) == pytest.approx(fault.asked(), abs=error + ROUNDING[dtype] * fault.asked())


@every_fault
def test_an_unchanged_tensor_reads_back_as_no_fault(fault):
    x = gaussian(64, 256)
    found = fault.read_back(x, x.clone())
    nothing = {"non_determinism": 1, "truncation": 23}.get(fault.kind, 0)
    assert found is None or found.isnan() or float(found) == pytest.approx(nothing, abs=1e-6)


@every_dtype
@every_fault
def test_nan_and_infinity(fault, dtype):
    """They stay non-finite, and hurt no finite neighbour; formats share a NaN over its scale, clipping cuts infinities."""
    x = gaussian(4, 64, dtype=dtype)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), float("-inf")
    y = fault.apply(x, Draw(6))
    scope = getattr(fault, "scope", "block" if fault.kind == "mxfp4" else "tensor")
    assert y[0, 3].isnan()
    if fault.kind == "saturation" or scope == "none":
        assert y[1, 5].isfinite()
        assert y[1, 5] == y[1, :32].abs().max()
        assert y[2, 7] == -y[2, :32].abs().max()
    else:
        assert not y[1, 5].isfinite()
        assert not y[2, 7].isfinite()
    if not isinstance(fault, Format) or scope == "none":
        assert torch.equal(y.isfinite() | ~x.isfinite(), torch.ones(4, 64, dtype=torch.bool))
    elif scope == "tensor":
        assert y.isnan().all()
    else:
        assert y[0, 3:32].isnan().all()
        assert y[3].isfinite().all()
    found = fault.read_back(x, y)
    assert found is None or found.dim() == 0


FORMULAS = {
    "gain": lambda x: x * 1.1,
    "systematic_bias": lambda x: x + x.sign() * 0.1,
    "bias": lambda x: x + 0.1 * x.std(correction=0),
    "dead_zone": lambda x: x.where(x.abs() >= 0.1 * x.abs().max(), 0.0),
    "saturation": lambda x: x.clamp(-0.1 * x.abs().max(), 0.1 * x.abs().max()),
    "truncation": lambda x: (x / step(x)).trunc() * step(x),
    "stuck_bit": lambda x: x + step(x) * 2 * x.sign() * (1 - (x.abs() / (2 * step(x))).floor() % 2),
}


def step(x: Tensor) -> Tensor:
    """The weight of the third mantissa bit of each value."""
    return torch.exp2(x.abs().log2().floor() - 3)


@pytest.mark.parametrize("kind", FORMULAS)
def test_steady_faults_compute_what_their_docstring_says(kind):
    x = gaussian(24, 40)
    torch.testing.assert_close(sample(kind).apply(x, Draw(5)).double(), FORMULAS[kind](x.double()), rtol=1e-6, atol=1e-7)


reduced = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@reduced
@pytest.mark.parametrize("kind", ["gain", "systematic_bias", "dead_zone", "saturation"])
def test_a_reduced_type_is_computed_in_float32_and_rounded_once(kind, dtype):
    x = gaussian(64, 33, dtype=dtype)
    assert torch.equal(sample(kind).apply(x, Draw(0)), FORMULAS[kind](x.float()).to(dtype))


@pytest.mark.parametrize("fault", [f for f in FAULTS if getattr(f, "scope", "") in ("token", "block")], ids=lambda f: f.text())
def test_a_scope_is_the_tensor_scope_on_each_of_its_parts(fault):
    x = gaussian(6, 300) * torch.logspace(-2, 2, 6).unsqueeze(-1)
    whole = sample(fault.kind)
    width = 300 if fault.scope == "token" else getattr(fault, "block", 128)
    rows = [torch.cat([whole.apply(p, Draw(5)) for p in row.split(width)]) for row in x]
    assert same(fault.apply(x, Draw(5)), torch.stack(rows))
    assert not same(fault.apply(x, Draw(5)), whole.apply(x, Draw(5)))


@pytest.mark.parametrize("magnitude", [0.01, 0.5])
def test_which_bit_is_flipped_does_not_depend_on_how_rarely_one_is(magnitude):
    x = gaussian(512, 1024)
    changed = bits(make_fault({"kind": "bit_flip", "magnitude": magnitude}).apply(x, Draw(5))) ^ bits(x)
    flips = x.numel() * magnitude
    assert all(0.5 * flips / 32 < int(((changed >> b) & 1).sum()) < 2 * flips / 32 for b in range(32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@every_dtype
@every_fault
def test_an_accelerator_gives_what_the_cpu_gives(fault, dtype):
    x = gaussian(24, 40, dtype=dtype)
    y = fault.apply(x.cuda(), Draw(5))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, "cuda")
    assert same(y, fault.apply(x.cuda(), Draw(5)))
    torch.testing.assert_close(y.cpu(), fault.apply(x, Draw(5)), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def _std(x):
    return (x - x.mean()).square().mean().sqrt()


def _hit(draw, x, share):
    return draw.uniform(x).double() < share


DRAWN = {
    "relative_gaussian:0.3": lambda x, draw, z: x * (1 + 0.3 * z),
    "absolute_gaussian:0.3": lambda x, draw, z: x + 0.3 * z,
    "noise:0.3": lambda x, draw, z: x + 0.3 * _std(x) * z,
    "rms_gaussian:0.3": lambda x, draw, z: x + 0.3 * x.square().mean().sqrt() * z,
    "non_determinism:1.5": lambda x, draw, z: x + 0.5**0.5 * _std(x) * z,
    "non_determinism:1.5,mode=amplified": lambda x, draw, z: x.mean() + (x - x.mean()) * (1 + 0.5 * draw.number()) ** 0.5,
    "spike:8,rate=0.2": lambda x, draw, z: torch.where(_hit(draw, x, 0.2), 8 * x, x),
    "spike:8,rate=0.2,mode=max": lambda x, draw, z: torch.where(_hit(draw, x, 0.2), 8 * x.abs().max() * x.sign(), x),
    "bit_flip:0.2,bit=31": lambda x, draw, z: torch.where(_hit(draw, x, 0.2), -x, x),
}


@pytest.mark.parametrize("text", DRAWN)
def test_random_faults_make_of_their_draw_what_their_docstring_says(text):
    """Held against the formula, with the very numbers that were drawn, in float64."""
    fault, draw = Plan.parse(f"{text}@layer.0").clauses[0].fault, Draw(5)
    x = torch.randn(40, 50, generator=torch.Generator(torch.get_default_device()).manual_seed(2)) + 0.25
    wanted = DRAWN[text](x.double(), draw, draw.normal(x).double())
    torch.testing.assert_close(fault.apply(x, draw).double(), wanted, rtol=1e-5, atol=1e-6)
    assert not same(fault.apply(x, draw), x)

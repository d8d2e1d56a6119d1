"""Number formats against ml_dtypes and torchao, bit for bit.

ml_dtypes rounds to the element grids, torchao quantizes whole blocks. Where the two disagree with each other, or with
us, a test says so.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import torchao.prototype.mx_formats.mx_tensor as mx
import torchao.prototype.mx_formats.nvfp4_tensor as nv
from torch import Tensor

from shaketable.faults import Draw, FaultBase, make_fault
from shaketable.faults.cpu import native
from shaketable.faults.formats import MXFP4, to_e2m1, to_e4m3, to_e5m2
from tests.tensors import same_numbers as same

E2M1, E4M3, E5M2 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FP8 = {"fp8_e4m3": (E4M3, 448.0), "fp8_e5m2": (E5M2, 57344.0)}
GRIDS = {"e2m1": (E2M1, to_e2m1, 6.0), "e4m3": (E4M3, to_e4m3, 448.0), "e5m2": (E5M2, to_e5m2, 57344.0)}
FORMATS = ("mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2")
INF, NAN = float("inf"), float("nan")
each_fp8 = pytest.mark.parametrize("kind", FP8)
each_format = pytest.mark.parametrize("kind", FORMATS)
each_grid = pytest.mark.parametrize("grid", GRIDS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def quantized(kind: str, x: Tensor, key: int = 1, **fields: str) -> Tensor:
    """`x` in that format."""
    return make_fault({"kind": kind, **fields}).apply(x, Draw(key))


def cast(x: Tensor, dtype: type) -> Tensor:
    """ml_dtypes' own cast there and back, in float32."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.float().numpy().astype(dtype).astype(np.float32))


def codes(dtype: type) -> Tensor:
    """The value of every code point, NaN and infinity among them."""
    raw = np.arange(16 if dtype is E2M1 else 256, dtype=np.uint8)
    return torch.from_numpy(raw.view(dtype).astype(np.float32))


def finite_codes(dtype: type) -> Tensor:
    """The finite values in order, -0.0 left out."""
    found = codes(dtype)
    return found[found.isfinite()].unique()


def random_blocks(rows: int, width: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Gaussian rows, each scaled by its own power of two between 2^low and 2^high."""
    g = torch.Generator().manual_seed(3)
    exponent = torch.randint(low, high + 1, (rows, 1), generator=g).double()
    return (torch.randn(rows, width, generator=g).double() * exponent.exp2()).to(dtype)


def odd_blocks(dtype: torch.dtype) -> Tensor:
    """Blocks of 32 with zeros of both signs, subnormals, extremes, infinities and NaN."""
    heads = [
        [0.0, -0.0], [-0.0, -0.0], [1e-45, -1e-45], [1e-39, -9e-40, 1e-45], [2.0**-126, -(2.0**-127)], [3.3e38, -1e38, 1.0],
        [INF, 1.0, -1.0], [-INF, -INF, 3e38], [NAN, 1.0], [NAN, INF, -INF], [6.0, 5.0, -0.0], [7.99, -7.0, 2.5], [1e-30, 1e30],
    ]  # fmt: skip
    return torch.tensor([h + [0.0] * (32 - len(h)) for h in heads]).to(dtype)


# Element grids and FP8


@each_grid
def test_midpoints_round_to_the_even_code(grid):
    dtype, rounded, _ = GRIDS[grid]
    points = finite_codes(dtype)
    middle = (points[1:] + points[:-1]) / 2
    assert same(rounded(middle), cast(middle, dtype))
    positive = points[points >= 0]
    ties = rounded((positive[1:] + positive[:-1]) / 2)
    even = torch.stack([positive[i + i % 2] for i in range(len(positive) - 1)])
    assert torch.equal(ties, even)


@both_dtypes
@each_fp8
def test_every_bfloat16_value_is_cast_as_ml_dtypes_casts_it(kind, dtype):
    ml, largest = FP8[kind]
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    wanted = cast(x.float().clamp(-largest, largest), ml).to(dtype)
    assert wanted.isnan().sum() == 254
    assert same(quantized(kind, x, scope="none"), wanted)


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
@both_dtypes
@each_fp8
def test_scaled_fp8_is_the_cast_of_the_scaled_value(kind, dtype, scope):
    ml, largest = FP8[kind]
    x = random_blocks(16, 256, -3, 3, dtype)
    parts = {"tensor": x.reshape(1, -1), "token": x, "block": x.reshape(-1, 128)}[scope].float()
    scale = parts.abs().amax(-1, keepdim=True) / largest
    wanted = cast((parts / scale).clamp(-largest, largest), ml) * scale
    assert same(quantized(kind, x, scope=scope), wanted.reshape(16, 256).to(dtype))


def test_a_cast_without_a_scale_saturates():
    """Past 448 ml_dtypes gives NaN and torch 448; past 57344 both may give infinity."""
    x = torch.tensor([449.0, 500.0, 1e6, -500.0, INF])
    assert quantized("fp8_e4m3", x, scope="none").tolist() == [448, 448, 448, -448, 448]
    y = torch.tensor([60000.0, 65536.0, -1e9, INF])
    assert quantized("fp8_e5m2", y, scope="none").tolist() == [57344, 57344, -57344, 57344]


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
@each_fp8
def test_fp8_of_values_too_small_for_a_scale_is_finite(kind, scope):
    """amax / 448 underflows to zero; a zero must not become 0 / 0."""
    for amax in (1e-45, 1e-44, 1e-42, 1e-41, 1e-38):
        y = quantized(kind, torch.tensor([[amax, 0.0, -amax / 2]]), scope=scope)
        assert y.isfinite().all()
        assert (y[0, 1] == 0) & (y.abs().max() <= 1.1 * torch.tensor(amax))


# MXFP4


def mxfp4_kernel(x: Tensor) -> Tensor:
    if not native.available():
        pytest.skip("no C++ compiler here")
    found = native.mxfp4(x)
    assert found is not None
    return found


def mxfp4_plain(x: Tensor) -> Tensor:
    return MXFP4()._plain(x, Draw(1)).to(x.dtype)


each_route = pytest.mark.parametrize("route", [mxfp4_kernel, mxfp4_plain])


def mxfp4_by_ml_dtypes(x: Tensor) -> Tensor:
    """The OCP text, in float64: the scale is 2^(floor(log2 max) - 2), its exponent no less than -127."""
    blocks = x.double().unflatten(-1, (-1, 32))
    highest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(highest).exponent - 3).clamp_min(-127).double().where(highest > 0, -127.0)
    scale = exponent.exp2().where(~highest.isnan(), NAN)
    return (cast(blocks / scale, E2M1).double() * scale).where(~highest.isnan(), NAN).flatten(-2).to(x.dtype)


def mxfp4_by_torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    """torchao's values, and its scale bytes."""
    scale, data = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.FLOOR)
    return mx.to_dtype(data, scale, torch.float4_e2m1fn_x2, 32, x.dtype), scale.view(torch.uint8)


@both_dtypes
@each_route
def test_mxfp4_random_blocks_as_the_ocp_text_says(route, dtype):
    x = random_blocks(4000, 32, -130, 120, dtype)
    assert same(route(x), mxfp4_by_ml_dtypes(x))


@both_dtypes
@each_route
def test_mxfp4_random_blocks_as_torchao(route, dtype):
    x = random_blocks(4000, 64, -130, 120, dtype)
    wanted, scale = mxfp4_by_torchao(x)
    normal = (scale > 0).all(-1)
    assert normal.sum() > 3500
    assert same(route(x)[normal], wanted[normal])


@both_dtypes
@each_route
def test_mxfp4_zeros_subnormals_infinities_and_nan(route, dtype):
    x = odd_blocks(dtype)
    wanted, scale = mxfp4_by_torchao(x)
    y = route(x)
    normal = scale.squeeze(-1) > 0
    assert normal.sum() == 8
    assert same(y[normal], wanted[normal])
    finite = x.isfinite().all(-1)
    assert same(y[finite], mxfp4_by_ml_dtypes(x[finite]))
    assert y[6, :3].tolist() == [INF, 0.0, 0.0]
    assert y[x.isnan().any(-1)].isnan().all()
    assert not y[~x.isnan().any(-1)].isnan().any()


# NVFP4


def nvfp4_by_torchao(x: Tensor) -> Tensor:
    whole = nv.per_tensor_amax_to_scale(x.abs().amax())
    scale, data = nv.nvfp4_quantize(x, 16, whole)
    values = nv.f4_unpacked_to_f32(nv.unpack_uint4(data)).unflatten(-1, (-1, 16))
    return (values * (whole * scale.float()).view(*values.shape[:-1], 1)).flatten(-2).to(x.dtype)


def with_unit_scale(x: Tensor) -> Tensor:
    """`x` (at most 15 values, none above 6), 6 and a block of 2688: both of NVFP4's scales of the first block are 1."""
    first = torch.cat([x, torch.full((15 - len(x),), 0.5), torch.tensor([6.0])])
    return torch.cat([first, torch.full((16,), 2688.0)])


def test_nvfp4_keeps_all_16_codes_and_rounds_midpoints_to_even():
    grid = codes(E2M1)
    for part in (grid[:8], grid[8:]):
        x = with_unit_scale(part)
        assert same(quantized("nvfp4", x), x)
    points = finite_codes(E2M1)
    middle = (points[1:] + points[:-1]) / 2
    y = quantized("nvfp4", with_unit_scale(middle))
    assert same(y[: len(middle)], cast(middle, E2M1))


@both_dtypes
def test_nvfp4_random_blocks_as_torchao(dtype):
    for exponent in (-105, -60, -10, 0, 10, 60, 105):
        x = (random_blocks(64, 256, -12, 12, torch.float32) * 2.0**exponent).to(dtype)
        x[3] = 0.0
        x[4] = -0.0
        assert same(quantized("nvfp4", x), nvfp4_by_torchao(x))


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-35, 1e-33])
def test_nvfp4_of_tiny_tensors_is_finite_and_no_larger(amax):
    """Inverse scales overflow there; zeros must stay zeros, and values must not grow to the block's maximum."""
    x = torch.zeros(2, 32)
    x[0, :3] = torch.tensor([amax, -amax / 3, amax / 12])
    y = quantized("nvfp4", x)
    assert y.isfinite().all()
    assert (y[x == 0] == 0).all()
    assert ((y - x).abs().max() <= 0.2 * x.max()) | (amax < 1e-37)


# All of them


@both_dtypes
@pytest.mark.parametrize(("kind", "fields", "block"), [
    ("mxfp4", {}, 32), ("nvfp4", {}, 16), ("fp8_e4m3", {"scope": "block"}, 128), ("fp8_e5m2", {"scope": "block"}, 128),
])  # fmt: skip
def test_rows_are_padded_and_never_joined(kind, fields, block, dtype):
    for width in (1, block - 1, block + 1, 2 * block + 5, 3 * block):
        x = random_blocks(7, width, -8, 8, dtype)
        padded = torch.nn.functional.pad(x, (0, -width % block))
        y = quantized(kind, x, **fields)
        assert same(y, quantized(kind, padded, **fields)[:, :width])
        if kind != "nvfp4":
            rows = torch.stack([quantized(kind, row, **fields) for row in x])
            assert same(y, rows)


# Stochastic rounding


def stochastic_case(kind: str) -> tuple[FaultBase, Tensor, Tensor]:
    """A fault, a tensor whose first 15 values are quantized with scale 1, and the grid they land on."""
    x = torch.tensor([0.1, -0.2, 0.25, 0.6, -0.9, 1.2, 1.6, -2.2, 2.9, 3.1, -3.9, 4.1, 5.5, -5.9, 0.4])
    x = with_unit_scale(x) if kind == "nvfp4" else torch.cat([x, torch.full((17,), 6.0)])
    scope = {"scope": "none"} if kind in FP8 else {}
    fault = make_fault({"kind": kind, "rounding": "stochastic", **scope})
    return fault, x, finite_codes(FP8[kind][0] if kind in FP8 else E2M1)


@each_format
def test_stochastic_rounding_is_unbiased_and_lands_on_neighbours(kind):
    fault, x, grid = stochastic_case(kind)
    draws = torch.stack([fault.apply(x, Draw(key)) for key in range(3000)])[:, :15]
    x = x[:15]
    above = grid[torch.searchsorted(grid, x)]
    below = grid[torch.searchsorted(grid, x, right=True) - 1]
    assert ((draws == above) | (draws == below)).all()
    up = ((x - below) / (above - below)).where(above != below, 0.0)
    sigma = (above - below) * (up * (1 - up) / len(draws)).sqrt()
    assert ((draws.mean(0) - x).abs() <= 4.5 * sigma + 1e-6).all()
    moved = sigma > 0
    assert moved.sum() >= 8
    assert (draws == above).any(0)[moved].all()
    assert (draws == below).any(0)[moved].all()


@each_grid
def test_stochastic_rounding_never_moves_a_value_that_is_on_the_grid(grid):
    """The remainder is 0, so the probability is: even the largest uniform number below 1 must not carry."""
    dtype, rounded, largest = GRIDS[grid]
    x = codes(dtype)
    for noise in (0.0, 0.5, 1 - 2.0**-24):
        assert same(rounded(x, torch.full_like(x, noise)), x.clamp(-largest, largest))

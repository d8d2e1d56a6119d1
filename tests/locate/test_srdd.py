"""SRDD's statistics against scipy and closed forms."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shaketable.locate.diagnosis import LayerStatistics
from shaketable.locate.srdd import dc_input, layer_statistics, note_drops, probe_input

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEALTHY = LayerStatistics(gain=1.0, min_gain=0.9, kurtosis=500.0, instability=0.0, pile_up=5e-5, distinct=30000)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def measured(layer, x, repeats=3):
    probed, shifted = probe_input(x, seed=0), dc_input(x)
    return layer_statistics(x, [layer(x) for _ in range(repeats)], probed, layer(probed), shifted, layer(shifted))


def answers(*outputs):
    """Statistics of outputs alone, their input being the first of them."""
    x = outputs[0]
    return layer_statistics(x, list(outputs), probe_input(x, 0), x, dc_input(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a", [0.25, 1.0, -2.0])
def test_a_linear_layer_has_its_factor_as_gain(a, dtype):
    """Powers of two are exact in every dtype, so the probe's own rounding is all there is, and it cancels."""
    found = measured(lambda x: a * x, normal(2, 32, 64).to(dtype))
    assert found.gain == pytest.approx(abs(a), rel=1e-9)


@settings(max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=50))
def test_kurtosis_is_scipys_on_any_values(values):
    y = torch.tensor(values).reshape(1, 1, -1)
    spread = float(y.double().std())
    if spread > 1e-3 * float(y.abs().max()):
        assert answers(y).kurtosis == pytest.approx(scipy.stats.kurtosis(y.double().numpy(), axis=None), rel=1e-6, abs=1e-6)


def test_relative_noise_has_its_scale_as_instability():
    y = normal(1, 64, 256)
    noisy = [y * (1 + 0.05 * normal(1, 64, 256, seed=i)) for i in range(2, 6)]
    assert answers(*noisy).instability == pytest.approx(0.05, rel=0.03)


def test_clamped_values_pile_up():
    y = normal(1, 32, 128)
    assert answers(y).pile_up == pytest.approx(2 / y.numel())
    outside = (y.abs() >= 1.5).double().mean().item()
    assert answers(y.clamp(-1.5, 1.5)).pile_up == pytest.approx(outside)
    assert answers(y.clamp(max=1.5)).pile_up == pytest.approx((y >= 1.5).double().mean().item() + 1 / y.numel())


weird = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, math.inf, math.nan, 65504.0, 3.4e38, 1e-45, 1.0]))


@settings(max_examples=150)
@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 3), st.integers(1, 5), st.integers(1, 3))
def test_weird_values_raise_nothing_and_give_no_infinity(data, dtype, tokens, channels, repeats):
    def tensor():
        values = data.draw(st.lists(weird, min_size=tokens * channels, max_size=tokens * channels))
        return torch.tensor(values).reshape(1, tokens, channels).to(dtype)

    x = tensor()
    probed, shifted = probe_input(x, 0), dc_input(x)
    found = layer_statistics(x, [tensor() for _ in range(repeats)], probed, tensor(), shifted, tensor())
    assert probed.shape == shifted.shape == x.shape
    assert not any(math.isinf(value) for value in astuple(found))
    row = [found, replace(HEALTHY), replace(found)]
    note_drops(row)
    assert all(math.isfinite(one.drop_z) for one in row)


@pytest.mark.parametrize("layer", [1, 6, 11])
def test_the_sharpest_fall_of_the_kurtosis_has_the_lowest_drop_z(layer):
    found = [replace(HEALTHY, kurtosis=500 + 20 * math.cos(i)) for i in range(12)]
    found[layer].kurtosis = 20.0
    note_drops(found)
    assert min(range(12), key=lambda i: found[i].drop_z) == layer and found[layer].drop_z < -2

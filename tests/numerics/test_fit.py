"""Error models read back from a clean and a faulty tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from shaketable.faults import Draw, make_fault
from shaketable.numerics.fit import ROUNDING, best_fit, distance


def activations(dtype=torch.float32, rows=64, channels=576):
    """Heavy tails and one massive channel, as a language model has them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, generator=generator) * torch.randn(rows, channels, generator=generator).exp()
    x[:, 17] *= 50
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "magnitude"), [("relative_gaussian", 0.05), ("absolute_gaussian", 0.1)])
def test_the_planted_noise_is_named_with_its_magnitude(kind, magnitude, dtype):
    clean = activations(dtype)
    faulty = make_fault({"kind": kind, "magnitude": magnitude}).apply(clean, Draw(5, None))
    found = best_fit(clean, faulty)
    assert found.kind == kind
    assert found.magnitude == pytest.approx(magnitude, rel=0.03 if dtype == torch.float32 else 0.1)
    assert found.log_gain > 0
    assert found.fault == make_fault({"kind": kind, "magnitude": float(f"{found.magnitude:.6g}")})


def test_rounding_is_the_best_model_of_rounding():
    wide = activations(torch.float64)
    noise = 1 + 1e-4 * torch.randn(wide.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = wide.bfloat16(), (wide * noise).bfloat16()
    assert not torch.equal(a, b)
    found = best_fit(a, b)
    assert found.kind == ROUNDING
    assert found.fault is None


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "gain", "magnitude": 0.05},
        {"kind": "truncation", "magnitude": 4},
        {"kind": "spike", "magnitude": 10, "rate": 0.01},
    ],
    ids=lambda fields: fields["kind"],
)
def test_an_error_that_is_no_noise_is_a_poor_fit(fields):
    clean = activations()
    assert not best_fit(clean, make_fault(fields).apply(clean, Draw(5, None))).is_good


def test_the_noise_s_likelihood_is_scipy_s():
    clean = activations()
    faulty = make_fault({"kind": "absolute_gaussian", "magnitude": 0.1}).apply(clean, Draw(5, None))
    found = best_fit(clean, faulty)
    d = (faulty.double() - clean.double()).flatten().numpy()
    # Against the same laws with the rounding floor left out: the floor is a millionth of the noise.
    gain = stats.norm.logpdf(d, scale=d.std()).sum()
    floor = (2 * 2.0**-48 * clean.double().square() / 3).flatten().numpy()
    size = float(clean.double().square().mean().sqrt())
    rounding = stats.norm.logpdf(d, scale=(floor + (2 * 2.0**-24 * size) ** 2) ** 0.5).sum()
    assert found.log_gain == pytest.approx(gain - rounding, rel=1e-3)
    assert found.magnitude == pytest.approx(stats.norm.fit(d, floc=0)[1], rel=1e-3)
    assert found.kind == "absolute_gaussian"


@settings(max_examples=50)
@given(some.lists(some.floats(-10, 10), min_size=1, max_size=60))
def test_the_distance_from_the_normal_is_scipy_s(values):
    assert distance(torch.tensor(values, dtype=torch.float64)) == pytest.approx(
        stats.kstest(values, "norm").statistic, abs=1e-12
    )

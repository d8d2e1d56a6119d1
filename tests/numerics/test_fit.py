"""Error models read back from a clean and a faulty tensor."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some
from scipy import stats

from shaketable.faults import Draw, make_fault
from shaketable.numerics.fit import LIMIT, ROUNDING, dead_zone, distance, fit_all, saturation

PLANTED = [
    ("relative_gaussian", 0.05, {}, 0.03),
    ("absolute_gaussian", 0.1, {}, 0.03),
    ("gain", 0.02, {}, 0.001),
    ("systematic_bias", 0.01, {}, 0.001),
    ("bias", 0.1, {}, 0.001),
    ("dead_zone", 0.01, {}, 0.01),
    ("dead_zone", 0.02, {"scope": "token"}, 0.01),
    ("dead_zone", 0.05, {"scope": "block"}, 0.01),
    ("saturation", 0.5, {}, 0.001),
    ("saturation", 0.4, {"scope": "token"}, 0.001),
    ("saturation", 0.6, {"scope": "block"}, 0.001),
]
"""Fault, magnitude, parameters, and the relative error of the magnitude that is allowed."""


def activations(dtype=torch.float32, rows=64, channels=576):
    """Heavy tails and one massive channel, as a language model has them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, generator=generator) * torch.randn(rows, channels, generator=generator).exp()
    x[:, 17] *= 50
    return x.to(dtype)


@pytest.mark.parametrize(("kind", "magnitude", "params", "tolerance"), PLANTED)
def test_the_planted_error_model_is_named_with_its_magnitude(kind, magnitude, params, tolerance):
    clean = activations()
    faulty = make_fault({"kind": kind, "magnitude": magnitude, **params}).apply(clean, Draw(5, None))
    found = fit_all(clean, faulty)[0]
    assert (found.kind, found.params) == (kind, params)
    assert found.magnitude == pytest.approx(magnitude, rel=tolerance)
    assert found.is_good
    assert found.log_gain > 0
    assert found.fault == make_fault({"kind": kind, "magnitude": float(f"{found.magnitude:.6g}"), **params})


@pytest.mark.parametrize(("kind", "magnitude", "params", "tolerance"), PLANTED)
def test_the_same_in_bfloat16_where_rounding_blurs_it(kind, magnitude, params, tolerance):
    clean = activations(torch.bfloat16)
    faulty = make_fault({"kind": kind, "magnitude": magnitude, **params}).apply(clean, Draw(5, None))
    found = fit_all(clean, faulty)[0]
    assert (found.kind, found.params) == (kind, params)
    assert found.magnitude == pytest.approx(magnitude, rel=max(tolerance, 0.1))


@pytest.mark.parametrize(("kind", "magnitude", "params", "tolerance"), PLANTED[:8])
def test_some_broken_channels_are_found_as_such(kind, magnitude, params, tolerance):
    clean = activations()
    faulty = make_fault({"kind": kind, "magnitude": magnitude, **params}).apply(clean, Draw(5, None))
    faulty[:, 72:] = clean[:, 72:]
    found = fit_all(clean, faulty)[0]
    assert (found.kind, found.params) == (kind, params | {"sparsity": 0.125})
    assert found.magnitude == pytest.approx(magnitude, rel=max(tolerance, 0.02))


def test_rounding_is_the_best_model_of_rounding():
    wide = activations(torch.float64)
    noise = 1 + 1e-4 * torch.randn(wide.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = wide.bfloat16(), (wide * noise).bfloat16()
    assert not torch.equal(a, b)
    found = fit_all(a, b)[0]
    assert found.kind == ROUNDING
    assert found.fault is None


def test_a_negative_gain_is_reported_and_no_plan_can_hold_it():
    clean = activations()
    best, *others = fit_all(clean, clean * 0.95)
    assert best.kind == "gain"
    assert best.magnitude == pytest.approx(-0.05, rel=1e-3)
    assert best.fault is None
    assert next(f for f in others if f.fault is not None).fault is not None


def test_an_error_that_no_candidate_describes_is_a_poor_fit():
    clean = activations()
    for fields in ({"kind": "truncation", "magnitude": 4}, {"kind": "spike", "magnitude": 10, "rate": 0.01}):
        assert not fit_all(clean, make_fault(fields).apply(clean, Draw(5, None)))[0].is_good


def test_a_prediction_that_explains_little_is_no_candidate():
    clean = activations()
    faulty = make_fault({"kind": "noise", "magnitude": 0.2}).apply(clean * 1.02, Draw(5, None))
    assert {f.kind for f in fit_all(clean, faulty)} == {ROUNDING, "relative_gaussian", "absolute_gaussian"}


def test_a_large_tensor_is_judged_by_some_rows_and_the_maximum_of_all():
    clean = activations(rows=1000)
    clean[503, 3] = 4 * clean.abs().max()
    for kind, magnitude in (("dead_zone", 1e-3), ("bias", 0.1)):
        found = fit_all(clean, make_fault({"kind": kind, "magnitude": magnitude}).apply(clean, Draw(5, None)))[0]
        assert (found.kind, found.params) == (kind, {})
        assert found.magnitude == pytest.approx(magnitude, rel=0.01)
        assert LIMIT <= found.values < 2 * LIMIT
    lonely = clean.clone()
    lonely[503] *= 1.5
    assert fit_all(clean, lonely)[0].values == clean.numel()


def test_values_that_are_no_numbers_are_left_out():
    clean = activations()
    faulty = clean * 1.02
    faulty[3, 5], faulty[7, 9] = float("nan"), float("inf")
    assert fit_all(clean, faulty)[0].kind == "gain"
    assert not fit_all(clean, torch.full_like(clean, float("nan")))


def test_the_noise_s_likelihood_is_scipy_s():
    clean = activations()
    faulty = make_fault({"kind": "absolute_gaussian", "magnitude": 0.1}).apply(clean, Draw(5, None))
    found = {f.kind: f for f in fit_all(clean, faulty)}
    d = (faulty.double() - clean.double()).flatten().numpy()
    size = clean.double().square().mean().sqrt()
    # Against the same law with the rounding floor left out: the floor is a millionth of the noise.
    scipy_bic = stats.norm.logpdf(d / float(size), scale=d.std() / float(size)).sum()
    ours = (found["absolute_gaussian"].bic - torch.log(torch.tensor(float(d.size))).item()) / -2
    assert ours == pytest.approx(scipy_bic, rel=1e-3)
    assert found["absolute_gaussian"].magnitude == pytest.approx(stats.norm.fit(d, floc=0)[1], rel=1e-3)


@settings(max_examples=50)
@given(some.lists(some.floats(-10, 10), min_size=1, max_size=60))
def test_the_distance_from_the_normal_is_scipy_s(values):
    assert distance(torch.tensor(values, dtype=torch.float64)) == pytest.approx(
        stats.kstest(values, "norm").statistic, abs=1e-12
    )


@settings(max_examples=50)
@given(some.lists(some.tuples(some.floats(-4, 4), some.floats(-0.3, 0.3)), min_size=2, max_size=12))
@example([(0.0, 0.25), (0.0, 0.25), (0.25, 0.0)])  # what was zero and is not any more has no sign
def test_no_threshold_is_better_than_the_one_found(values):
    c, noise = torch.tensor(values, dtype=torch.float64).T
    part, f = c.abs() / 4, c.where(c.abs() >= 1, 0.0) + noise
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)
    error = lambda t: float((f - c.where(part >= t, 0.0)).square().sum())  # noqa: E731
    assert error(dead_zone(part, c, f)) <= min(error(t) for t in grid if bool((part < t).any()) or t == 1) + 1e-9

    ceiling, f = torch.full_like(c, 4.0), c.clamp(-2, 2) + noise
    error = lambda t: float((f - c.clamp(-4 * t, 4 * t)).square().sum())  # noqa: E731
    best = saturation(part, ceiling, c, f)
    assert error(best) <= min(error(float(t)) for t in grid if float(t) <= float(part.max())) + 1e-9

"""Error models of small tensors against likelihoods that numpy and scipy compute, and thresholds against brute force."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from shaketable.locate.compare import fit as module
from shaketable.locate.compare.fit import ROUNDING, Fit, _log_choose, _Pair, _scale, fit, fit_all, some_rows
from shaketable.locate.compare.threshold_fit import dead_zone, saturation
from tests.tensors import draw

U32, U16 = 2.0**-24, 2.0**-8
NAN, INF = float("nan"), float("inf")


def floor(c, m, unit):
    """What two correct devices may differ by, squared, where the clean values have an rms of 1."""
    return unit**2 * (c**2 + m**2) / 3 + (2 * 2.0**-24) ** 2


def log_likelihood(c, f, m, h, s, unit):
    return stats.norm.logpdf(f, loc=m, scale=np.sqrt(s**2 * h**2 + floor(c, m, unit))).sum()


def scaled(clean, faulty):
    c, f = clean.double().numpy(), faulty.double().numpy()
    size = np.sqrt((c**2).mean())
    return c / size, f / size, size


def best_scale(c, f, m, h, unit):
    """The noise of greatest likelihood, by a search."""
    found = optimize.minimize_scalar(
        lambda e: -log_likelihood(c, f, m, h, math.exp(e), unit), bounds=(-25, 5), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(found.x)


def clean_values(rows=24, channels=40):
    return draw(rows, channels) * draw(rows, channels, seed=1).exp()


def named(fits):
    return {(f.kind, f.params.get("scope", "tensor"), "sparsity" in f.params): f for f in fits}


# ---- likelihoods


def predicted(kind, c):
    """A candidate's direction, by its definition."""
    if kind == "gain":
        return c
    return np.sign(c) if kind == "systematic_bias" else np.full_like(c, c.std())


@pytest.mark.parametrize("kind", ["gain", "systematic_bias", "bias"])
@pytest.mark.parametrize("magnitude", [0.03, -0.2])
def test_a_prediction_is_least_squares_and_its_likelihood_is_scipys(kind, magnitude):
    clean = clean_values()
    c, _, size = scaled(clean, clean)
    noise = draw(24, 40, seed=3).double().numpy() * 1e-3
    faulty = torch.tensor((c + magnitude * predicted(kind, c) + noise) * size).float()
    c, f, size = scaled(clean, faulty)
    along = predicted(kind, c)
    share = ((f - c) * along).sum() / (along**2).sum()
    mean = c + share * along
    scale = best_scale(c, f, mean, np.ones_like(c), U32)
    found = named(fit_all(clean, faulty))[kind, "tensor", False]
    assert found.magnitude == pytest.approx(share * (size if kind == "systematic_bias" else 1), rel=1e-6)
    likelihood = log_likelihood(c, f, mean, np.ones_like(c), scale, U32)
    assert found.bic == pytest.approx(2 * math.log(960) - 2 * likelihood, rel=1e-6)
    assert found.log_gain == pytest.approx(likelihood - log_likelihood(c, f, c, 0 * c, 0, U32), rel=1e-6)
    assert found.explained == pytest.approx(1 - ((f - mean) ** 2).sum() / ((f - c) ** 2).sum(), rel=1e-6)
    z = (f - mean) / np.sqrt(scale**2 + floor(c, mean, U32)) * np.where(c < 0, -1, 1)
    assert found.ks == pytest.approx(stats.kstest(z.ravel(), "norm").statistic, abs=1e-4)
    assert (found.values, found.params, found.kind) == (960, {}, kind)


@pytest.mark.parametrize("kind", ["relative_gaussian", "absolute_gaussian"])
@pytest.mark.parametrize("unit", [U32, U16])
def test_noise_is_that_of_greatest_likelihood(kind, unit):
    clean = clean_values()
    shape = clean.abs() if kind == "relative_gaussian" else torch.full_like(clean, 2.0)
    faulty = clean + 0.05 * shape * draw(24, 40, seed=5)
    c, f, size = scaled(clean, faulty)
    h = np.abs(c) if kind == "relative_gaussian" else np.ones_like(c)
    scale = best_scale(c, f, c, h, unit)
    found = named(fit_all(clean, faulty, unit))[kind, "tensor", False]
    assert found.magnitude == pytest.approx(scale * (size if kind == "absolute_gaussian" else 1), rel=1e-4)
    likelihood = log_likelihood(c, f, c, h, scale, unit)
    assert found.bic == pytest.approx(math.log(960) - 2 * likelihood, rel=1e-6) and found.explained == 0
    assert found.log_gain == pytest.approx(likelihood - log_likelihood(c, f, c, 0 * c, 0, unit), rel=1e-6)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, U32), (torch.bfloat16, U16), (torch.float16, 2.0**-11)])
def test_rounding_has_no_parameter_and_the_unit_of_its_dtype(dtype, unit):
    clean = clean_values().to(dtype)
    faulty = (clean.double() * (1 + 0.5 * unit * draw(24, 40, seed=5).double())).to(dtype)
    c, f, _ = scaled(clean, faulty)
    found = named(fit_all(clean, faulty))[ROUNDING, "tensor", False]
    assert found.bic == pytest.approx(-2 * log_likelihood(c, f, c, 0 * c, 0, unit), rel=1e-9)
    assert (found.magnitude, found.log_gain, found.explained, found.params) == (0, 0, 0, {})


def test_some_channels_are_judged_alone_and_cost_their_names():
    clean = clean_values()
    wrong = np.zeros(40, dtype=bool)
    wrong[[3, 8, 21, 22]] = True
    faulty = clean.clone()
    faulty[:, wrong] *= 1 + 0.05 * draw(24, 4, seed=6)
    c, f, _ = scaled(clean, faulty)
    h = np.abs(c) * wrong
    scale = best_scale(c, f, c, h, U32)
    found = named(fit_all(clean, faulty))["relative_gaussian", "tensor", True]
    assert found.params == {"sparsity": 0.1} and found.magnitude == pytest.approx(scale, rel=1e-4)
    likelihood = log_likelihood(c, f, c, h, scale, U32)
    assert found.bic == pytest.approx(math.log(960) + 2 * math.log(special.comb(40, 4)) - 2 * likelihood, rel=1e-6)
    z = ((f - c) / np.sqrt(scale**2 * h**2 + floor(c, c, U32)) * np.where(c < 0, -1, 1))[:, wrong]
    assert found.ks == pytest.approx(stats.kstest(z.ravel(), "norm").statistic, abs=1e-4)
    assert fit(clean, faulty) == found


@pytest.mark.parametrize("kind", ["gain", "systematic_bias", "bias"])
def test_a_prediction_on_some_channels_is_least_squares_on_those(kind):
    clean = clean_values()
    c, _, size = scaled(clean, clean)
    wrong = np.zeros(40)
    wrong[:10] = 1
    faulty = torch.tensor((c + 0.125 * predicted(kind, c) * wrong) * size).float()
    found = fit(clean, faulty)
    assert (found.kind, found.params) == (kind, {"sparsity": 0.25})
    assert found.magnitude == pytest.approx(0.125 * (size if kind == "systematic_bias" else 1), rel=1e-4)


def test_a_share_of_channels_is_written_with_six_digits():
    clean = clean_values(channels=45)[:, :15]
    faulty = clean.clone()
    faulty[:, 5:10] *= 1.25
    found = fit(clean, faulty)
    assert (found.kind, found.params) == ("gain", {"sparsity": 0.333333}) and found.fault.sparsity == 0.333333


def test_the_best_is_the_first_and_every_noise_is_there():
    clean = clean_values()
    fits = fit_all(clean, clean * 1.02)
    assert (
        [f.bic for f in fits] == sorted(f.bic for f in fits) and fits[0].kind == "gain" and fit(clean, clean * 1.02) == fits[0]
    )
    assert {ROUNDING, "relative_gaussian", "absolute_gaussian"} <= {f.kind for f in fits}
    assert all(f.explained > 0.5 for f in fits if f.kind not in (ROUNDING, "relative_gaussian", "absolute_gaussian"))


# ---- thresholds of each scope


def highest(clean, scope):
    a = clean.abs().numpy()
    if scope == "tensor":
        return np.full_like(a, a.max())
    if scope == "token":
        return np.repeat(a.max(-1, keepdims=True), a.shape[-1], -1)
    return np.concatenate([np.repeat(p.max(-1, keepdims=True), p.shape[-1], -1) for p in (a[:, :32], a[:, 32:])], -1)


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
@pytest.mark.parametrize("kind", ["dead_zone", "saturation"])
def test_a_threshold_is_read_back_with_its_scope(kind, scope):
    clean = clean_values(channels=72)[:, :56]
    a, peak = clean.numpy(), np.float32(0.25) * highest(clean, scope)
    made = np.where(np.abs(a) < peak, 0, a) if kind == "dead_zone" else np.clip(a, -peak, peak)
    found = fit(clean, torch.tensor(made))
    assert (found.kind, found.params) == (kind, {} if scope == "tensor" else {"scope": scope})
    assert found.magnitude == pytest.approx(0.25, rel=0.05 if kind == "dead_zone" else 1e-4)
    assert found.explained == pytest.approx(1, abs=1e-6)


def test_a_threshold_is_judged_by_its_prediction_and_two_parameters():
    clean = clean_values()
    faulty = clean.clamp(-1, 1) + 1e-3 * draw(24, 40, seed=7)
    found = named(fit_all(clean, faulty))["saturation", "tensor", False]
    c, f, size = scaled(clean, faulty)
    cut = found.magnitude * float(clean.abs().max()) / size
    mean = np.clip(c, -cut, cut)
    scale = best_scale(c, f, mean, np.ones_like(c), U32)
    likelihood = log_likelihood(c, f, mean, np.ones_like(c), scale, U32)
    assert cut * size == pytest.approx(1, rel=1e-2) and found.bic == pytest.approx(2 * math.log(960) - 2 * likelihood, rel=1e-6)


@pytest.mark.parametrize("kind", ["dead_zone", "saturation"])
def test_the_maximum_may_lie_in_a_row_that_is_not_looked_at(monkeypatch, kind):
    monkeypatch.setattr(module, "LIMIT", 160)
    clean = draw(30, 16)
    clean[7, 3] = 8.0
    faulty = clean.where(clean.abs() >= 0.8, 0.0) if kind == "dead_zone" else clean.clamp(-0.8, 0.8)
    faulty[7, 3] = 8.0 if kind == "dead_zone" else 0.8
    found = fit(clean, faulty)
    assert (found.kind, found.params, found.values) == (kind, {}, 160)
    assert found.magnitude == pytest.approx(0.1, rel=0.05 if kind == "dead_zone" else 1e-4)


def test_rounding_of_other_channels_does_not_hide_a_threshold_of_some():
    clean = draw(24, 16)
    clean[3, 1] = 5.0
    faulty = clean * (1 + 2.0**-10 * draw(24, 16, seed=1))
    faulty[:, :4] = clean[:, :4].where(clean[:, :4].abs() >= 0.5, 0.0)
    found = fit(clean, faulty, U16)
    assert (found.kind, found.params) == ("dead_zone", {"sparsity": 0.25}) and found.magnitude == pytest.approx(0.1, rel=0.1)


def test_a_threshold_is_no_candidate_where_the_error_does_not_look_like_one():
    clean = clean_values()
    kinds = {f.kind for f in fit_all(clean, clean * 1.5)}
    assert not kinds & {"dead_zone", "saturation"}
    assert "saturation" not in {f.kind for f in fit_all(clean, clean.where(clean.abs() > 0.1, clean * 2))}


def test_a_threshold_is_a_candidate_from_half_of_the_changed_values_on():
    clean = torch.arange(1.0, 41.0).view(1, 40)
    faulty = clean.clone()
    faulty[0, :4] = 0
    assert "dead_zone" in {f.kind for f in fit_all(clean, faulty)}
    faulty[0, 4:8] += 1e-3
    assert "dead_zone" in {f.kind for f in fit_all(clean, faulty)}, "four of eight"
    faulty[0, 8] += 1e-3
    assert "dead_zone" not in {f.kind for f in fit_all(clean, faulty)}, "four of nine"


# ---- what is looked at


def test_values_that_are_no_numbers_count_as_clean_zeros():
    clean = torch.tensor([[1.0, NAN, 3.0, INF, 2.0]])
    faulty = torch.tensor([[2.0, 1.0, NAN, 1.0, 4.0]])
    pair = _Pair.of(clean, faulty, U32)
    size = math.sqrt(5 / 5)
    assert (pair.c * size).tolist() == [[1, 0, 0, 0, 2]] and (pair.f * size).tolist() == [[2, 0, 0, 0, 4]]
    assert fit(clean, faulty).values == 5 and fit(clean, faulty).kind == "gain"
    assert _Pair.of(torch.tensor([NAN, 1.0]), torch.tensor([1.0, INF]), U32) is None and fit_all(clean * NAN, faulty) == []


def test_sizes_are_in_units_of_the_clean_tensor_or_of_the_faulty_one_where_that_is_zero():
    assert _Pair.of(torch.full((4,), 2.0), torch.full((4,), 6.0), U32).f.tolist() == [3.0] * 4
    zero = _Pair.of(torch.zeros(4), torch.full((4,), 6.0), U32)
    assert (zero.size, zero.f.tolist(), zero.d.tolist()) == (6.0, [1.0] * 4, [1.0] * 4)
    assert _Pair.of(torch.zeros(4), torch.zeros(4), U32).size == 1.0


@pytest.mark.parametrize(
    ("shape", "wrong", "rows"),
    [
        ((10, 4), 4, [0, 4, 9]), ((10, 4), 3, None), ((10, 4), 0, [0, 4, 9]), ((10, 4), 9, [0, 4, 9]), ((3, 4), 1, None), ((12,), 1, None),
        ((40,), 7, None), ((2, 5, 4), 4, [0, 4, 9]), ((10, 5), 4, [0, 4, 9]), ((2, 100), 1, [0]), ((2, 100), 0, [0]), ((0, 4), None, None),
    ],
)  # fmt: skip
def test_of_many_rows_some_are_looked_at_unless_the_error_is_elsewhere(monkeypatch, shape, wrong, rows):
    monkeypatch.setattr(module, "LIMIT", 12)
    clean = torch.arange(float(math.prod(shape))).view(shape)
    faulty = clean.clone()
    if wrong is not None:
        faulty.view(-1, shape[-1])[wrong if len(shape) > 1 else 0] += 1
    a, b = some_rows(clean, faulty)
    if rows is None or (shape == (2, 100) and wrong == 1):
        assert a is clean and b is faulty
    else:
        flat = clean.view(-1, shape[-1])
        assert torch.equal(a, flat[rows]) and torch.equal(b, faulty.view(-1, shape[-1])[rows])


@pytest.mark.parametrize(
    ("share", "found"), [((0, 10), None), ((1, 10), [0]), ((8, 10), list(range(8))), ((9, 10), None), ((10, 10), None)]
)
def test_channels_are_named_where_some_of_them_are_wrong(share, found):
    clean = torch.ones(5, share[1], dtype=torch.float64)
    faulty = clean.clone()
    faulty[:, : share[0]] += 0.5
    lanes = _Pair.of(clean, faulty, U16).wrong_lanes()
    assert (lanes if lanes is None else lanes.nonzero().flatten().tolist()) == found


@pytest.mark.parametrize(("times", "wrong"), [(3.9, False), (4.1, True)])
def test_a_channel_is_wrong_from_four_times_its_rounding_on(times, wrong):
    clean = torch.ones(6, 4, dtype=torch.float64)
    faulty = clean.clone()
    faulty[:, 2] += times * math.sqrt(2 * U16**2 / 3 + (2 * U32) ** 2)
    assert (_Pair.of(clean, faulty, U16).wrong_lanes() is not None) is wrong


def test_a_number_alone_has_no_channels():
    assert _Pair.of(torch.tensor(1.0), torch.tensor(2.0), U32).wrong_lanes() is None


def test_the_maximum_and_the_spread_are_those_of_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 8)
    clean = torch.ones(9, 4)
    clean[1] = torch.tensor([100.0, -200.0, 0.0, 0.0])
    pair = _Pair.of(clean, clean + 1, U32)
    assert pair.c.shape == (2, 4) and float(pair.peak) == 200.0 and pair.raw.shape == (2, 4)
    assert pair.spread == pytest.approx(float(clean.double().std(unbiased=False)), rel=1e-6)


# ---- helpers


@pytest.mark.parametrize(
    ("error", "floors", "variance"), [([4.0, 6.0], 1.0, 4.0), ([0.5, 0.5], 1.0, 0.0), ([3.0, 3.0], 0.0, 3.0)]
)
def test_the_variance_of_plain_noise_is_what_is_beyond_the_floor(error, floors, variance):
    e = torch.tensor(error, dtype=torch.float64)
    assert _scale(e, torch.full_like(e, floors), torch.ones(())) == pytest.approx(variance, abs=1e-12)


def test_noise_of_no_size_anywhere_has_no_variance():
    e = torch.ones(3, dtype=torch.float64)
    assert _scale(e, e, torch.zeros(3, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize(("n", "k"), [(5, 2), (40, 4), (7, 0), (7, 7), (576, 72)])
def test_the_price_of_names_is_the_log_of_how_many_there_are(n, k):
    assert _log_choose(n, k) == pytest.approx(math.log(math.comb(n, k)), rel=1e-9, abs=1e-9)


def test_a_fault_has_six_digits_and_the_parameters_of_its_fit():
    facts = {"values": 9, "log_gain": 1.0, "bic": 0.0, "explained": 0.9, "ks": 0.0}
    assert Fit("gain", 1 / 3, {"sparsity": 0.25}, **facts).fault.text() == "gain:0.333333,sparsity=0.25"
    assert Fit("dead_zone", 0.1234567, {"scope": "block"}, **facts).fault.magnitude == 0.123457


# ---- thresholds by brute force


@pytest.mark.parametrize(
    ("part", "f", "t"),
    [
        ([0.1, 0.2, 0.3], [0.0, 0.0, 0.3], 0.25), ([0.3, 0.1, 0.2], [0.3, 0.0, 0.0], 0.25), ([0.1, 0.2, 0.3], [0.0, 0.2, 0.3], 0.15),
        ([0.1, 0.2, 0.4], [0.0, 0.0, 0.0], 0.4 * (1 + 1e-6)), ([0.5, 1.0], [0.0, 0.0], 1.0), ([0.2, 0.2, 0.6], [0.0, 0.0, 0.6], 0.4),
        ([0.4], [0.0], 0.4 * (1 + 1e-6)),
    ],
)  # fmt: skip
def test_a_dead_zone_ends_halfway_to_the_first_value_that_is_left(part, f, t):
    p = torch.tensor(part, dtype=torch.float64)
    assert dead_zone(p, p * 4, torch.tensor(f, dtype=torch.float64) * 4) == pytest.approx(t, rel=1e-12)


@pytest.mark.parametrize(
    ("c", "f", "t"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 2.0], 0.5), ([1.0, -2.0, 4.0], [1.0, -1.5, 1.5], 0.375), ([1.0, 2.0, -4.0], [1.0, 2.0, -3.0], 0.75),
        ([4.0, -4.0], [2.0, -1.0], 0.375), ([4.0, 1.0], [4.0, 1.0], 1.0),
    ],
)  # fmt: skip
def test_a_cut_is_where_the_cut_values_lie(c, f, t):
    c, f = (torch.tensor(v, dtype=torch.float64) for v in (c, f))
    assert saturation(c.abs() / 4, torch.full_like(c, 4.0), c, f) == pytest.approx(t, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_with_maxima_of_its_own_for_every_token_no_cut_is_better(seed):
    c = draw(6, 5, seed=seed).double()
    ceiling = c.abs().amax(-1, keepdim=True).expand_as(c)
    f = torch.maximum(torch.minimum(c, 0.6 * ceiling), -0.6 * ceiling) + 0.05 * draw(6, 5, seed=seed + 50).double()
    c, ceiling, f = c.flatten(), ceiling.flatten(), f.flatten()
    error = lambda t: float((f - torch.maximum(torch.minimum(c, t * ceiling), -t * ceiling)).square().sum())  # noqa: E731
    best = saturation(c.abs() / ceiling, ceiling, c, f)
    assert error(best) <= min(error(t) for t in np.linspace(0.01, 1, 500)) + 1e-9
    zeroed = c.where(c.abs() >= 0.4 * ceiling, 0.0) + 0.02 * draw(30, seed=seed + 90).double()
    loss = lambda t: float((zeroed - c.where(c.abs() / ceiling >= t, 0.0)).square().sum())  # noqa: E731
    assert loss(dead_zone(c.abs() / ceiling, c, zeroed)) <= min(loss(t) for t in np.linspace(0.1, 1, 500)) + 1e-9

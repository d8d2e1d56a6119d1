"""The numbers of stage 1."""

import numpy as np
import pytest

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.gap import differences, distance, k3_of, mean_interval, measure_gap
from shaketable.mismatch.rounding import judge


def test_known_numbers():
    found = distance([np.log([2.0, 1.0]), np.log([0.5])])
    assert found.tokens == 3
    assert found.k1 == pytest.approx(0.0)
    assert found.k3 == pytest.approx((0.5 - 1 + np.log(2) + 0 + 2 - 1 - np.log(2)) / 3)
    assert found.outside == pytest.approx(2 / 3)
    assert found.largest == pytest.approx(np.log(2))


def test_k3_does_not_cancel():
    d = np.array([1e-7, 9.9e-5, 1.01e-4, 1e-3])
    assert k3_of(d) == pytest.approx(d**2 / 2 - d**3 / 6 + d**4 / 24, rel=1e-6)


def test_k1_and_k3_estimate_the_divergence():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    drawn = np.random.default_rng(0).choice(3, 200_000, p=p)
    found = distance(differences([np.log(p[drawn])], [np.log(q[drawn])]))
    exact = float((p * np.log(p / q)).sum())
    assert found.k1 == pytest.approx(exact, rel=0.1)
    assert found.k3 == pytest.approx(exact, rel=0.05)


def test_an_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for blocks in (20, 3):  # rollouts with a mean of their own, and too few of them
        spread = 0.5 if blocks == 20 else 0.0
        drawn = [mean_interval([rng.normal(rng.normal(0, spread), 1, 30) for _ in range(blocks)]) for _ in range(500)]
        assert 0.9 < np.mean([low < 0 < high for low, high in drawn]) < 0.98


def test_the_worst_token_is_named_where_it_is():
    rollouts = [Rollout([1], [4, 5, 6], [-1.0, -1.0, -1.0]), Rollout([1], [7], [-1.0])]
    trainer = [[-1.0, -3.0, -1.1], [-1.0]]
    judged = judge(differences([r.logprobs for r in rollouts], trainer), [np.ones(3), np.ones(1)])
    found = measure_gap(rollouts, trainer, judged, lambda token: f"<{token}>")
    worst = found.worst[0]
    assert (worst.rollout, worst.position, worst.text, worst.trainer) == (0, 1, "<5>", -3.0)
    assert sum(row.tokens for row in found.by_position) == 4
    assert found.interval_over == "tokens"

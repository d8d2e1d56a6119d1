"""What is made of a record: written by hand here, so that every number is known; scipy as the oracle."""

import math

import numpy as np
import pytest
from scipy import stats

from shaketable.evaluate.statistics import wilson
from shaketable.evaluate.sweep.config import SweepConfig
from shaketable.evaluate.sweep.results import results
from shaketable.records.record import RunRecord

N = 40
RNG = np.random.default_rng(0)
CLEAN = RNG.random(N) < 0.7
FAULTY = {(m, s): CLEAN ^ (RNG.random(N) < m) for m in (0.05, 0.3) for s in (4, 5)}


def ledger(fires, error, remark=None):
    measured = {"measured_error": error, "measured_magnitude": error, "changed_fraction": 1.0, "remark": remark}
    return {
        "sites": [
            {"site": "op.matmul", "fault": "f", "asked": 0.1, "matched": 2, "forward": fires, "backward": 0, "fused": 0}
            | measured
        ]
    }


def run(correct, seconds=2.0, tokens=100, **facts):
    answers = [{"id": str(i), "text": "", "correct": bool(c), "formatted": i % 2 == 0} for i, c in enumerate(correct)]
    clean = {"ledger": None, "plan": None, "formatted": 0.5}
    return clean | {"answers": answers, "seconds": seconds, "tokens": tokens, "batch_size": 8} | facts


def record_of(tmp_path, events, **fields):
    made = {
        "models": ("m",),
        "task": "t",
        "plan": "relative_gaussian@op.matmul",
        "magnitudes": (0.05, 0.3),
        "n": N,
        "seeds": 2,
        "seed": 4,
    }
    config = SweepConfig.checked(**made | fields)
    record = RunRecord.create(tmp_path / "run", "sweep", config.model_dump(mode="json"), {})
    for event in events:
        record.append("point", **{"model": "m"} | event)
    return record


def whole():
    yield {"magnitude": 0.0, "seed": 4, **run(CLEAN)}
    for (magnitude, seed), correct in FAULTY.items():
        drift = {"kl": magnitude, "agreement": 1 - magnitude, "tokens": 9} if seed == 4 else None
        facts = run(correct, ledger=ledger(7, magnitude * seed), plan=f"at {magnitude}", drift=drift)
        yield {"magnitude": magnitude, "seed": seed, **facts}


def test_accuracy_has_wilsons_interval_over_problems_not_over_seeds(tmp_path):
    clean, _, strong = results(record_of(tmp_path, whole()))["points"]
    expected = stats.binomtest(int(CLEAN.sum()), N).proportion_ci(method="wilson")
    assert clean["accuracy"] == pytest.approx(CLEAN.mean())
    assert (clean["ci_low"], clean["ci_high"]) == pytest.approx((expected.low, expected.high))
    mean = [FAULTY[0.3, s].mean() for s in (4, 5)]
    assert strong["accuracy_per_seed"] == pytest.approx(mean)
    assert strong["accuracy"] == pytest.approx(np.mean(mean))
    assert (strong["n"], strong["seeds"], strong["formatted"]) == (N, [4, 5], 0.5)
    expected = wilson(np.mean(mean), N)
    assert (strong["ci_low"], strong["ci_high"]) == pytest.approx((expected.low, expected.high))


def test_differences_are_paired_with_clean(tmp_path):
    _, weak, strong = results(record_of(tmp_path, whole()))["points"]
    d = np.mean([FAULTY[0.3, s] for s in (4, 5)], axis=0) - CLEAN
    assert strong["difference"] == pytest.approx(d.mean())
    assert strong["difference_low"] < d.mean() < strong["difference_high"]
    flips = [(int((FAULTY[0.3, s] > CLEAN).sum()), int((FAULTY[0.3, s] < CLEAN).sum())) for s in (4, 5)]
    assert strong["mcnemar_per_seed"] == pytest.approx([stats.binomtest(won, won + lost).pvalue for won, lost in flips])
    smaller, larger = sorted([weak["p"], strong["p"]])
    assert sorted([weak["p_adjusted"], strong["p_adjusted"]]) == pytest.approx([2 * smaller, max(larger, 2 * smaller)])


# --- texts ----------------------------------------------------------------------------------------------------------------

TOKENS = RNG.integers(5, 50, N)


def read(losses, right, kl=0.5, cut=0):
    rows = [
        {"id": f"{i}", "tokens": int(t), "loss": x, "correct": int(c), "kl": kl, "agree": int(t) // 2}
        for i, (t, x, c) in enumerate(zip(TOKENS, losses, right, strict=True))
    ]
    return {
        "texts": rows,
        "ledger": None,
        "plan": None,
        "seconds": 1.0,
        "tokens": int(TOKENS.sum()),
        "batch_size": 4,
        "cut": cut,
    }


def texts(losses_by_seed):
    right = TOKENS // 3
    yield {"magnitude": 0.0, "seed": 4, **read(2.0 * TOKENS, right, kl=0.0, cut=2)}
    for seed, losses in losses_by_seed.items():
        yield {"magnitude": 0.3, "seed": seed, **read(losses, right - seed + 3), "plan": "p", "ledger": ledger(1, 0.1)}


def test_texts_are_the_unit_of_a_text_task(tmp_path):
    losses = {s: list(TOKENS * RNG.normal(2.5, 0.3, N)) for s in (4, 5)}
    clean, faulty = results(record_of(tmp_path, texts(losses), magnitudes=(0.3,)))["points"]
    assert clean["loss"] == pytest.approx(2.0) and clean["perplexity"] == pytest.approx(math.exp(2.0))
    total = sum(sum(x) for x in losses.values()) / (2 * TOKENS.sum())
    assert faulty["loss"] == pytest.approx(total) and faulty["perplexity"] == pytest.approx(math.exp(total))
    assert faulty["kl"] == pytest.approx(0.5 * N / TOKENS.sum())
    assert faulty["agreement"] == pytest.approx((TOKENS // 2).sum() / TOKENS.sum())
    share = (TOKENS // 3) / TOKENS
    expected = stats.ttest_1samp(share, 0).confidence_interval()
    assert (clean["accuracy"], clean["ci_low"], clean["ci_high"]) == pytest.approx((share.mean(), expected.low, expected.high))
    off = np.mean([np.array(x) / TOKENS for x in losses.values()], axis=0) - 2.0
    expected = stats.ttest_1samp(off, 0).confidence_interval()
    found = [faulty[f"loss_difference{x}"] for x in ("", "_low", "_high")]
    assert found == pytest.approx([off.mean(), expected.low, expected.high])
    assert "paired over 40 texts" in faulty["sentence"] and "problem" not in faulty["sentence"]
    assert faulty["mcnemar_per_seed"] == []

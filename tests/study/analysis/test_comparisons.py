"""Differences of a study: which side is which, against scipy, the sentence, the families of Holm."""

import numpy as np
import pytest
from scipy import stats

from shaketable.evaluate.statistics import over_seeds
from shaketable.study.analysis import comparisons
from shaketable.study.config import Comparing
from shaketable.study.runs import Run
from tests.study.small_studies import told


def compare(asked, primary, runs):
    return told(comparisons.compare(asked, primary, runs))


def verdict(runs, counted, unlike):
    return told(comparisons.verdict(comparisons.compare([FAULTY], FAULTY, runs), counted, unlike))


FAULTY = Comparing(a="AQN", b="none", condition="faulty")


def run(arm, seed, scores=(), status="done", **step):
    answers = [{"correct": bool(s), "formatted": True} for s in scores]
    events = [{"event": "step", "step": i, "reward": 0.5, "seconds": 1.0, "aqn_seconds": 0.1} | step for i in range(4)]
    events.append({"event": "evaluation", "step": 4, "conditions": [{"name": "faulty", "answers": answers}]})
    return Run(f"{arm}-{seed}", "train", arm, seed, status, {}, events)


def arms(a, b):
    """Runs of two arms, a row of 0/1 for every seed."""
    return [run("AQN", i, row) for i, row in enumerate(a)] + [run("none", i, row) for i, row in enumerate(b)]


def drawn(rate, seeds=5, n=80, key=0):
    return (np.random.default_rng(key).random((seeds, n)) < rate).astype(int).tolist()


def test_the_difference_is_a_minus_b():
    a, b = drawn(0.9), drawn(0.5, key=1)
    [found] = compare([FAULTY], FAULTY, arms(a, b))
    assert found["difference"] == pytest.approx(np.mean(a) - np.mean(b))
    assert found["difference"] > 0.2
    assert found["ci_low"] < found["difference"] < found["ci_high"]
    assert found["verdict"] == "shown" and found["primary"]
    assert found["sentence"].startswith(f"AQN − none, faulty accuracy: +{100 * found['difference']:.1f} points, 95 % CI +")
    assert "5 seeds: shown (p < 0.001)" in found["sentence"]
    swapped = compare([Comparing(a="none", b="AQN", condition="faulty")], None, arms(a, b))[0]
    assert swapped["difference"] == -found["difference"]
    assert "−" in swapped["sentence"].split(":")[1]


def test_seeds_and_problems_are_crossed_as_in_measure():
    a, b = drawn(0.6), drawn(0.5, key=1)
    [found] = compare([FAULTY], FAULTY, arms(a, b))
    expected = over_seeds(b, a)
    assert (found["p"], found["ci_low"], found["ci_high"]) == (expected.p, expected.interval.low, expected.interval.high)
    assert found["p_holm"] == found["p"], "the primary comparison stands alone"
    assert found["verdict"] == "not shown"
    assert "not shown (p = " in found["sentence"] and "would have been seen with 80 % power)" in found["sentence"]


def test_secondary_comparisons_are_one_family_without_the_primary():
    others = [Comparing(a="AQN", b="none", condition="faulty", endpoint=e) for e in ("formatted",)]
    more = Comparing(a="none", b="AQN", condition="faulty")
    found = compare([FAULTY, *others, more], FAULTY, arms(drawn(0.62), drawn(0.5, key=1)))
    primary, formatted, swapped = found
    assert primary["p_holm"] == primary["p"]
    assert swapped["p_holm"] == pytest.approx(min(1, 2 * swapped["p"]))
    assert formatted["p_holm"] == 1.0
    assert swapped["detectable"] > primary["detectable"], "two comparisons must see more to show it"
    assert "after Holm" in swapped["sentence"] and "after Holm" not in primary["sentence"]


def test_numbers_of_a_run_are_compared_by_a_paired_t():
    rng = np.random.default_rng(0)
    a, b = 2 + rng.random(5), 1 + rng.random(5)
    runs = [run("AQN", i, seconds=x) for i, x in enumerate(a)] + [run("none", i, seconds=x) for i, x in enumerate(b)]
    what = Comparing(a="AQN", b="none", endpoint="seconds_per_step")
    [found] = compare([what], what, runs)
    expected = stats.ttest_rel(a, b)
    assert found["difference"] == pytest.approx(np.mean(a - b))
    assert found["p"] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (found["ci_low"], found["ci_high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found["detectable"] > 0
    assert "seconds per step: +" in found["sentence"] and " s, 95 % CI" in found["sentence"]


def test_the_final_reward_is_the_mean_of_the_last_tenth_and_times_are_medians():
    steps = [
        {"event": "step", "step": i, "reward": float(i), "seconds": 1.0 + 99 * (i == 0), "aqn_seconds": 0.5} for i in range(30)
    ]
    one = Run("a-0", "train", "a", 0, "done", {}, steps)
    assert one.value("reward") == (27 + 28 + 29) / 3
    assert one.value("seconds_per_step") == 1.0
    assert one.value("aqn_share") == pytest.approx(15 / 129)
    few = Run("a-0", "train", "a", 0, "done", {}, steps[:3])
    assert few.value("reward") == 2.0 and Run("a-0", "train", "a", 0, "done", {}, []).value("reward") is None


@pytest.mark.parametrize(("rates", "headline"), [((0.4, 0.9), "below none"), ((0.6, 0.6), "Not shown")])
def test_the_headline_says_which_side_is_better(rates, headline):
    a, b = drawn(rates[0]), drawn(rates[1], key=1)
    runs = arms(a, b)
    said = verdict(runs, runs, [])
    assert headline in said["headline"]
    partial = verdict(runs, [*runs, run("AQN", 9, status="failed")], [])
    assert partial["headline"].startswith("So far (1 of 11 runs are missing): ")
    unlike = verdict(runs, runs, ["other weights"])
    assert unlike["kind"] == "nothing" and unlike["headline"] == "Nothing can be concluded: other weights"


def losing(arm, seed, losses):
    rows = [{"correct": False, "formatted": True, "loss": loss} for loss in losses]
    conditions = [{"name": "faulty", "answers": rows}]
    return Run(f"{arm}-{seed}", "train", arm, seed, "done", {}, [{"event": "evaluation", "step": 4, "conditions": conditions}])


LOSS = Comparing(a="AQN", b="none", condition="faulty", endpoint="loss")


def test_losses_are_compared_in_nats_whatever_their_size():
    rng = np.random.default_rng(0)
    a, b = 6 * rng.random((4, 30)), 9 * rng.random((4, 30))
    runs = [losing("AQN", i, row) for i, row in enumerate(a)] + [losing("none", i, row) for i, row in enumerate(b)]
    [found] = compare([LOSS], LOSS, runs)
    scale = max(a.max(), b.max())
    expected = over_seeds(b / scale, a / scale)
    assert found["difference"] == pytest.approx(a.mean() - b.mean()) and found["p"] == expected.p
    ends = (found["ci_low"], found["ci_high"], found["detectable"])
    assert ends == pytest.approx(tuple(scale * x for x in (expected.interval.low, expected.interval.high, expected.detectable)))
    assert (found["unit"], found["scale"], found["problems"]) == ("nats", 1.0, 30)
    assert f"faulty loss: −{abs(found['difference']):.3g} nats, 95 % CI −" in found["sentence"]

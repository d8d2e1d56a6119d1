"""Comparisons when seeds are missing, out of order or alike, families of Holm with holes, and every sentence word for word."""

import re

import numpy as np
import pytest
from scipy import stats

from shaketable.evaluate.statistics import Comparison, Interval, over_seeds, t_detectable
from shaketable.study.analysis.comparisons import Asked, _sentence, compare
from shaketable.study.analysis.runs import Run
from shaketable.study.config import Comparing

HOT = Comparing(a="A", b="B", condition="hot")
TIMES = Comparing(a="A", b="B", endpoint="seconds_per_step")
REWARD = Comparing(a="A", b="B", endpoint="reward")
LOSS = Comparing(a="A", b="B", condition="hot", endpoint="loss")


def scored(arm, seed, correct=(), status="done", **named):
    """A run with answers under `hot`; `named` are lists of other things of an answer, such as its loss."""
    size = max([len(correct), *map(len, named.values())])
    rows = [{"correct": True, "formatted": True} for _ in range(size)]
    for name, values in {"correct": correct, **named}.items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    events = [{"event": "evaluation", "step": 1, "conditions": [{"name": "hot", "answers": rows}]}]
    return Run(f"{arm}{seed}", "train", arm, seed, status, {}, events)


def numbered(arm, seed, value, name="seconds"):
    return Run(f"{arm}{seed}", "train", arm, seed, "done", {}, [{"event": "step", "step": 0, name: value}])


def both(a, b, make=scored, **more):
    return [make("A", i, x, **more) for i, x in enumerate(a)] + [make("B", i, x, **more) for i, x in enumerate(b)]


def drawn(rate, key, seeds=5, n=40):
    return (np.random.default_rng(key).random((seeds, n)) < rate).astype(int).tolist()


# ---- pairs


def test_seeds_are_paired_by_their_number_whatever_the_order_of_the_runs():
    runs = [scored("A", 10, [1, 1]), scored("B", 2, [0, 1]), scored("A", 2, [1, 0]), scored("B", 10, [0, 0])]
    asked = Asked.of(HOT, runs)
    assert (asked.seeds, asked.a, asked.b) == ([2, 10], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]])
    assert asked.differences() == [0.0, 1.0]
    [found] = compare([HOT], HOT, runs)
    assert found["per_seed"] == [{"seed": 2, "value": 0.0}, {"seed": 10, "value": 1.0}]


@pytest.mark.parametrize(
    "other",
    [
        scored("B", 1, [0, 1], status="failed"),
        scored("B", 1, [None, 1]),
        Run("B1", "train", "B", 1, "done", {}, []),
        scored("B", 7, [0, 1]),
        scored("B", None, [0, 1]),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_seed_counts_when_both_arms_have_all_of_its_scores(other, turned):
    what = Comparing(a="B", b="A", condition="hot") if turned else HOT
    runs = [scored("A", 0, [1, 1]), scored("A", 1, [1, 1]), scored("A", None, [1, 1]), scored("B", 0, [0, 1]), other]
    assert Asked.of(what, runs).seeds == [0]


def test_a_run_of_another_arm_is_no_part_of_a_comparison():
    runs = [*both([[1, 1], [1, 0]], [[0, 0], [0, 1]]), scored("C", 0, [0, 0]), scored("C", 2, [0, 0])]
    assert Asked.of(HOT, runs) == Asked.of(HOT, runs[:4])


def test_scores_of_nothing_are_scores():
    [found] = compare([HOT], HOT, both([[0, 0, 0]] * 3, [[0, 0, 0]] * 3))
    assert (found["seeds"], found["problems"], found["difference"], found["verdict"]) == (3, 3, 0.0, "not shown")
    assert found["mcnemar"] == [1.0, 1.0, 1.0] and found["p_seeds"] == 1.0


def test_a_reward_of_nothing_is_a_number():
    runs = both([0.0, 0.0, 0.0], [0.0, 0.5, 0.25], numbered, name="reward")
    [found] = compare([REWARD], REWARD, runs)
    assert (found["seeds"], found["difference"]) == (3, -0.25)


def test_whether_there_is_a_score_for_every_problem_is_the_endpoints():
    endpoints = {
        "accuracy": "hot",
        "formatted": "hot",
        "loss": "hot",
        "reward": None,
        "seconds_per_step": None,
        "aqn_share": None,
    }
    found = {e: Asked(Comparing(a="A", b="B", condition=c, endpoint=e), [], [], []).per_problem for e, c in endpoints.items()}
    assert [e for e, yes in found.items() if yes] == ["accuracy", "formatted", "loss"]


def test_the_format_of_answers_is_compared_by_itself():
    what = Comparing(a="A", b="B", condition="hot", endpoint="formatted")
    a = [scored("A", s, [1] * 6, formatted=[True] * 6) for s in range(3)]
    b = [scored("B", s, [1] * 6, formatted=[s == 0, False, True, True, False, True]) for s in range(3)]
    [found] = compare([what], what, [*a, *b])
    rows = [[s == 0, 0, 1, 1, 0, 1] for s in range(3)]
    assert found["difference"] == pytest.approx(1 - np.mean(rows))
    assert (found["unit"], found["scale"]) == ("points", 100.0) and len(found["mcnemar"]) == 3
    assert found["sentence"].startswith("A − B, hot formatted: +")


# ---- numbers that are no 0 and 1


def test_scores_between_nothing_and_all_have_no_mcnemar():
    for a, b in (([[0.5, 1, 0]] * 2, [[0, 1, 0]] * 2), ([[0, 1, 0]] * 2, [[0.5, 1, 0]] * 2)):
        runs = [scored("A", i, x) for i, x in enumerate(a)] + [scored("B", i, x) for i, x in enumerate(b)]
        assert compare([HOT], HOT, runs)[0]["mcnemar"] == []


def test_numbers_of_a_run_that_happen_to_be_0_or_1_have_no_mcnemar():
    [found] = compare([REWARD], REWARD, both([1.0, 1.0, 0.0], [0.0, 1.0, 0.0], numbered, name="reward"))
    assert found["mcnemar"] == [] and found["problems"] is None


@pytest.mark.parametrize("turned", [False, True])
def test_losses_are_scaled_by_the_largest_of_both_arms(turned):
    rng = np.random.default_rng(3)
    small, large = 0.5 * rng.random((3, 12)), 40 * rng.random((3, 12))
    a, b = (large, small) if turned else (small, large)
    runs = [scored("A", i, loss=row) for i, row in enumerate(a)] + [scored("B", i, loss=row) for i, row in enumerate(b)]
    [found] = compare([LOSS], LOSS, runs)
    top = large.max()
    wanted = over_seeds(b / top, a / top)
    assert found["difference"] == pytest.approx(a.mean() - b.mean())
    assert found["ci_low"] == pytest.approx(top * wanted.interval.low) and found["p"] == pytest.approx(wanted.p)
    assert found["detectable"] is None or found["detectable"] == pytest.approx(top * wanted.detectable)


def test_what_losses_could_have_shown_is_at_the_level_of_their_family():
    rng = np.random.default_rng(4)
    a, b = 3 + rng.random((5, 30)), 3 + rng.random((5, 30))
    runs = [scored("A", i, loss=row) for i, row in enumerate(a)] + [scored("B", i, loss=row) for i, row in enumerate(b)]
    other = Comparing(a="B", b="A", condition="hot", endpoint="loss")
    top = max(a.max(), b.max())
    [alone], (first, second) = compare([LOSS], LOSS, runs), compare([LOSS, other], None, runs)
    assert alone["detectable"] == pytest.approx(top * over_seeds(b / top, a / top).detectable)
    assert first["detectable"] == pytest.approx(top * over_seeds(b / top, a / top, level=0.975).detectable)
    assert second["detectable"] == pytest.approx(first["detectable"]) and first["detectable"] > alone["detectable"]


def test_times_that_differ_by_the_same_in_truth_have_no_spread():
    """0.3 − 0.1 and 0.4 − 0.2 are one difference, and two numbers."""
    runs = both([0.3, 0.4, 0.5], [0.1, 0.2, 0.3], numbered)
    assert len({0.3 - 0.1, 0.4 - 0.2, 0.5 - 0.3}) > 1
    [found] = compare([TIMES], TIMES, runs)
    assert found["method"] == "no spread: paired t over training seeds" and found["p"] == 0.25
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.2, 0.2)) and found["detectable"] is None
    assert found["sentence"] == (
        "A − B, seconds per step: +0.2 s, 95 % CI +0.2 … +0.2, 3 seeds: not shown "
        "(p = 0.25; these seeds and problems can show no difference at all)"
    )


def test_numbers_of_a_run_may_be_far_beyond_one():
    a, b = [5000.0, 7000.0, 4000.0, 9000.0], [4000.0, 8000.0, 6000.0, 7000.0]
    [found] = compare([TIMES], TIMES, both(a, b, numbered))
    d = np.subtract(a, b)
    half = stats.t.ppf(0.975, 3) * stats.sem(d)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((d.mean() - half, d.mean() + half))
    assert found["p"] == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert found["detectable"] == pytest.approx(1e6 * t_detectable(stats.sem(d) / 1e6, 3))


# ---- families


def test_a_comparison_without_seeds_is_no_member_of_its_family():
    nothing = Comparing(a="A", b="none", condition="hot")
    others = [Comparing(a="B", b="A", condition="hot"), REWARD]
    steps = {f"{arm}{s}": {"event": "step", "step": 0, "reward": float(s * s + (arm == "A"))} for arm in "AB" for s in range(5)}
    runs = both(drawn(0.7, 0), drawn(0.5, 1))
    for one in runs:
        one.events.append(steps[one.name])
    primary, empty, turned, reward = compare([HOT, nothing, *others], HOT, runs)
    assert (empty["verdict"], empty["p"], empty["p_holm"], empty["primary"]) == ("nothing", None, None, False)
    ordered = sorted([turned["p"], reward["p"]])
    assert sorted([turned["p_holm"], reward["p_holm"]])[0] == pytest.approx(min(1.0, 2 * ordered[0]))
    assert turned["detectable"] == pytest.approx(over_seeds(drawn(0.7, 0), drawn(0.5, 1), level=0.975).detectable)
    assert primary["detectable"] == pytest.approx(over_seeds(drawn(0.5, 1), drawn(0.7, 0)).detectable)
    assert primary["p_holm"] == primary["p"] and [c["primary"] for c in (primary, turned, reward)] == [True, False, False]


def test_without_a_primary_comparison_all_are_one_family():
    runs = both(drawn(0.7, 0), drawn(0.5, 1))
    two = [HOT, Comparing(a="B", b="A", condition="hot")]
    found = compare(two, None, runs)
    assert [c["primary"] for c in found] == [False, False]
    assert [c["p_holm"] for c in found] == [pytest.approx(min(1, 2 * c["p"])) for c in found]
    assert compare([], None, runs) == []


def test_the_order_of_the_comparisons_is_kept():
    turned = Comparing(a="B", b="A", condition="hot")
    found = compare([turned, HOT], HOT, both(drawn(0.9, 0), drawn(0.3, 1)))
    assert [(c["a"], c["primary"], c["difference"] > 0) for c in found] == [("B", False, False), ("A", True, True)]


def test_a_small_p_that_does_not_outlive_the_correction_is_not_shown():
    rng = np.random.default_rng(5)
    d = rng.normal(0.35, 0.3, 6)
    runs = both((5 + d).tolist(), [5.0] * 6, numbered)
    family = [TIMES, Comparing(a="B", b="A", endpoint="seconds_per_step"), Comparing(a="A", b="C", endpoint="seconds_per_step")]
    family.append(Comparing(a="B", b="C", endpoint="seconds_per_step"))
    runs += [numbered("C", s, 5.0 + 0.01 * (-1) ** s) for s in range(6)]
    [alone], found = compare([TIMES], TIMES, runs), compare(family, None, runs)[0]
    assert 0.0125 < alone["p"] < 0.05 and alone["verdict"] == "shown"
    assert found["verdict"] == "not shown" and found["p"] == alone["p"] < 0.05 < found["p_holm"]
    assert f"not shown (p = {found['p']:.2g}, after Holm {found['p_holm']:.2g}; a true difference of " in found["sentence"]


# ---- sentences


def test_the_sentence_of_a_shown_difference_word_for_word():
    a, b = [[1, 1, 1, 1, 1, 1, 1, 0]] * 4, [[0, 0, 0, 0, 0, 0, 1, 0]] * 4
    a = [row if i else [1] * 8 for i, row in enumerate(a)]
    [found] = compare([HOT], HOT, both(a, b))
    low, high = 100 * found["ci_low"], 100 * found["ci_high"]
    assert found["p"] >= 0.001 and found["verdict"] == "shown"
    assert found["sentence"] == (
        f"A − B, hot accuracy: +{100 * found['difference']:.1f} points, 95 % CI +{low:.1f} … +{high:.1f}, 4 seeds: "
        f"shown (p = {found['p']:.2g})"
    )


def test_the_sentence_of_a_difference_that_is_not_shown_word_for_word():
    [found] = compare([HOT], HOT, both(drawn(0.5, 8), drawn(0.5, 9)))
    sign = [f"{100 * found[k]:+.1f}".replace("-", "−") for k in ("difference", "ci_low", "ci_high")]
    assert found["sentence"] == (
        f"A − B, hot accuracy: {sign[0]} points, 95 % CI {sign[1]} … {sign[2]}, 5 seeds: not shown (p = {found['p']:.2g}; "
        f"a true difference of {100 * found['detectable']:.1f} points would have been seen with 80 % power)"
    )


def test_the_sentence_of_a_number_with_a_unit_names_it_twice():
    [found] = compare([TIMES], TIMES, both([5.0, 7.0, 4.0, 9.0], [4.0, 8.0, 6.0, 7.0], numbered))
    assert found["sentence"].startswith("A − B, seconds per step: 0.0 s, 95 % CI −")
    assert f"a true difference of {found['detectable']:.2g} s would have been seen" in found["sentence"]
    assert found["difference"] == 0.0 and found["p"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("size", "shown"), [(1e-3, r"0\.00\d\d"), (1e-2, r"0\.0\d\d"), (1.0, r"\d\.\d"), (1e3, r"\de\+03|\d\.\de\+03")]
)
def test_what_a_number_could_have_shown_has_two_digits(size, shown):
    a, b = [5.0, 7.0, 4.0, 9.0], [4.0, 8.0, 6.0, 7.0]
    [found] = compare([TIMES], TIMES, both([size * x for x in a], [size * x for x in b], numbered))
    assert re.search(rf"; a true difference of ({shown}) s would have been seen with 80 % power\)$", found["sentence"])


@pytest.mark.parametrize(("p", "words"), [(0.001, "p = 0.001"), (0.00099, "p < 0.001"), (0.0314, "p = 0.031")])
def test_a_p_at_a_thousandth_is_told_and_below_it_is_not(p, words):
    found = Comparison(0.5, Interval(0.25, 0.75), p, "", "", None, 9, (3, 3))
    asked = Asked(HOT, [0, 1, 2], [[1.0]] * 3, [[0.0]] * 3)
    head = "A − B, hot accuracy: +50.0 points, 95 % CI +25.0 … +75.0, 3 seeds: shown"
    assert _sentence(asked, found, "points", 100.0) == f"{head} ({words})"
    after = words.replace("p = ", "").replace("p ", "")
    corrected = Comparison(0.5, Interval(0.25, 0.75), 0.0001, "", "", None, 9, (3, 3), adjusted=p)
    assert _sentence(asked, corrected, "points", 100.0) == f"{head} (p < 0.001, after Holm {after})"


@pytest.mark.parametrize(
    ("what", "runs", "words"),
    [
        (HOT, [], "A − B, hot accuracy: nothing can be concluded, no seed is finished in both arms"),
        (TIMES, [], "A − B, seconds per step: nothing can be concluded, no seed is finished in both arms"),
        (
            TIMES,
            both([1.0], [2.0], numbered),
            "A − B, seconds per step: nothing can be concluded, one seed is all that is finished in both arms",
        ),
        (
            HOT,
            both([[1, 1, 0, 1]], [[0, 0, 0, 1]]),
            "A − B, hot accuracy: +50.0 points, 95 % CI −52.4 … +100.0, 1 seed: nothing can be concluded about the recipes "
            "(one run of each; the seed may be all of it)",
        ),
    ],
)
def test_the_sentence_where_nothing_can_be_concluded(what, runs, words):
    [found] = compare([what], what, runs)
    assert (found["sentence"], found["verdict"]) == (words, "nothing")


@pytest.mark.parametrize(
    ("difference", "shown"), [(1234.5, "+1.23e+03"), (0.012345, "+0.0123"), (-2.0, "−2"), (-0.5, "−0.5"), (0.0, "0.0")]
)
def test_numbers_have_three_digits_and_a_sign(difference, shown):
    runs = both([difference] * 3, [0.0] * 3, numbered)
    [found] = compare([TIMES], TIMES, runs)
    assert found["sentence"].startswith(f"A − B, seconds per step: {shown} s, 95 % CI {shown} … {shown}, 3 seeds: not shown")


def test_a_p_of_a_thousandth_is_told_and_a_smaller_one_is_not():
    """Eleven equal differences have p = 2 / 2¹¹, ten 2 / 2¹⁰."""
    shown = [compare([TIMES], TIMES, both([1.0] * n, [0.0] * n, numbered))[0]["sentence"] for n in (9, 10, 11)]
    assert [text.partition(": shown ")[2] for text in shown] == ["(p = 0.0039)", "(p = 0.002)", "(p < 0.001)"]


def test_everything_a_comparison_of_one_seed_knows():
    [found] = compare([HOT], None, both([[1, 1, 0, 1]], [[0, 1, 0, 1]]))
    wanted = over_seeds([[0, 1, 0, 1]], [[1, 1, 0, 1]])
    assert found == {
        "a": "A", "b": "B", "condition": "hot", "endpoint": "accuracy", "unit": "points", "scale": 100.0, "difference": 0.25,
        "ci_low": wanted.interval.low, "ci_high": wanted.interval.high, "p": 1.0, "p_holm": 1.0, "p_seeds": None,
        "mcnemar": [1.0], "detectable": None, "seeds": 1, "problems": 4, "per_seed": [{"seed": 0, "value": 0.25}],
        "primary": False, "verdict": "nothing", "method": wanted.method, "sentence": found["sentence"],
    }  # fmt: skip


def test_everything_a_comparison_without_seeds_knows():
    [found] = compare([REWARD], REWARD, [])
    known = {"a": "A", "b": "B", "condition": None, "endpoint": "reward", "unit": "", "scale": 1.0, "mcnemar": [], "seeds": 0}
    known |= {"per_seed": [], "primary": True, "verdict": "nothing", "sentence": found["sentence"]}
    unknown = ("difference", "ci_low", "ci_high", "p", "p_holm", "p_seeds", "detectable", "problems", "method")
    assert found == known | dict.fromkeys(unknown)
    assert found["sentence"] == "A − B, final reward: nothing can be concluded, no seed is finished in both arms"

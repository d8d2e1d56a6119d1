"""What an arm came to when something is missing: seeds that agree, steps without a number, runs without a ledger."""

import numpy as np
import pytest
from scipy import stats

from shaketable.aqn.spec import AQN
from shaketable.evaluate.statistics import Interval, wilson
from shaketable.study.analysis.arms import (
    cost,
    curves,
    mean_interval,
    mechanism,
    plain_interval,
    proof,
    samples,
    scores,
    sigmas,
)
from shaketable.study.analysis.runs import Run


def run(*events, seed=0, kind="train", **config):
    return Run(f"r{seed}", kind, "arm", seed, "done", {"config": config}, [*events])


def evaluation(step=0, **conditions):
    rows = [{"name": name, **facts} for name, facts in conditions.items()]
    return {"event": "evaluation", "step": step, "conditions": rows}


def answered(*correct, **more):
    return {"answers": [{"id": f"p{i}", "correct": bool(c), "text": f"t{i}"} for i, c in enumerate(correct)], **more}


# ---- intervals


def test_seeds_that_agree_on_every_problem_tell_no_more_than_one():
    row = [1.0, 0.0, 0.0, 1.0, 1.0]
    for seeds in (1, 2, 5):
        assert mean_interval(np.array([row] * seeds)) == (wilson(0.6, 5), "Wilson, over problems")
    assert mean_interval(np.array([row] * 3), 0.8)[0] == wilson(0.6, 5, 0.8)


def test_seeds_with_one_mean_that_solve_different_problems_are_no_agreement():
    table = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0.0]])
    found, method = mean_interval(table)
    assert method == "t over seeds × problems, crossed"
    rest = ((table - table.mean(0)) ** 2).sum() / 6
    half = stats.t.ppf(0.975, 2) * np.sqrt(rest / 12)
    assert found == Interval(max(0.0, 0.5 - half), min(1.0, 0.5 + half))


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4)])
def test_one_seed_or_one_problem_has_wilsons_interval(shape):
    table = np.zeros(shape)
    table[0, 0] = 1.0
    found, method = mean_interval(table)
    assert (found, method) == (wilson(float(table.mean()), shape[1]), "Wilson, over problems")


def test_the_interval_of_a_share_stays_between_nothing_and_all():
    high = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0.0]])
    found, method = mean_interval(high)
    assert found.high == 1.0 and 0 < found.low < high.mean() and "crossed" in method
    low, _ = mean_interval(1 - high)
    assert low.low == 0.0 and low.high == pytest.approx(1 - found.low)


def test_the_interval_of_a_loss_has_no_such_ends():
    table = np.array([[0.1, 9.0], [0.0, 4.0], [3.0, 0.2]])
    found, method = plain_interval(table)
    assert found.low < 0 and found.high > 1 and method == "t over seeds × problems, crossed"
    assert found.low + found.high == pytest.approx(2 * table.mean())


def test_losses_of_one_seed_and_of_one_problem():
    row = np.array([[1.0, 2.0, 6.0]])
    wanted = stats.ttest_1samp(row[0], 0).confidence_interval(0.9)
    found, method = plain_interval(row, 0.9)
    assert (found.low, found.high, method) == (pytest.approx(wanted.low), pytest.approx(wanted.high), "t over problems")
    assert plain_interval(np.array([[2.0]])) == (Interval(2.0, 2.0), "one problem, no interval")
    assert plain_interval(np.array([[2.0], [4.0]])) == (Interval(3.0, 3.0), "one problem, no interval")


# ---- scores


def test_an_arm_that_solved_nothing_has_a_score_of_nothing():
    [found] = scores([run(evaluation(4, hot=answered(0, 0, 0)))], ["hot"])
    assert (found["mean"], found["ci_low"], found["n"], found["first"]) == (0.0, 0.0, 3, None)
    assert found["per_seed"] == [{"seed": 0, "value": 0.0}] and found["ci_high"] == wilson(0.0, 3).high


def test_a_score_of_nothing_before_training_is_a_score():
    events = [evaluation(0, hot=answered(0, 0, accuracy=0.0)), evaluation(4, hot=answered(1, 0, accuracy=0.5))]
    [found] = scores([run(*events), run(*events, seed=1)], ["hot"])
    assert (found["first"], found["mean"]) == (0.0, 0.5)


def test_scores_are_in_the_order_of_the_conditions_and_runs_without_one_are_left_out():
    runs = [
        run(evaluation(1, hot=answered(1, 1), cold=answered(0, 1)), seed=5),
        run(evaluation(1, cold=answered(1, 1)), seed=2),
        run(seed=7),
    ]
    cold, hot = scores(runs, ["cold", "none", "hot"])
    assert (cold["condition"], [s["seed"] for s in cold["per_seed"]], cold["mean"]) == ("cold", [5, 2], 0.75)
    assert (hot["condition"], [s["seed"] for s in hot["per_seed"]], hot["mean"]) == ("hot", [5], 1.0)
    assert scores(runs, []) == [] == scores([], ["hot"]) == scores(runs, ["hot"], "loss")


def test_a_condition_that_was_not_scored_before_training_has_no_first_score():
    events = [evaluation(0, other=answered(1, accuracy=1.0)), evaluation(4, hot=answered(1, accuracy=1.0))]
    assert scores([run(*events)], ["hot"])[0]["first"] is None


def test_losses_are_in_nats_and_shares_in_points():
    rows = {"answers": [{"correct": True, "loss": 2.0}, {"correct": False, "loss": 7.0}], "loss": 4.5, "accuracy": 0.5}
    one = run(evaluation(0, hot=rows | {"loss": 9.0}), evaluation(4, hot=rows))
    [loss], [share] = scores([one], ["hot"], "loss"), scores([one], ["hot"])
    assert (loss["unit"], loss["mean"], loss["endpoint"], loss["first"]) == ("nats", 4.5, "loss", 9.0)
    assert (share["unit"], share["mean"], share["endpoint"], share["first"]) == ("points", 0.5, "accuracy", 0.5)
    assert loss["ci_high"] > 7


# ---- curves


def test_a_curve_of_one_step_is_none_and_steps_are_in_their_order():
    steps = [{"event": "step", "step": n, "reward": 10.0 * n} for n in (2, 0, 1)]
    [found] = curves([run(*steps, {"event": "step", "step": 9, "loss": 1.0})], [])
    assert found["name"] == "reward" and [(p["step"], p["mean"]) for p in found["points"]] == [(0, 0.0), (1, 10.0), (2, 20.0)]


def test_steps_that_one_seed_lacks_are_those_of_the_others():
    first = [{"event": "step", "step": n, "reward": 1.0, "entropy": None} for n in range(3)]
    second = [{"event": "step", "step": n, "reward": 3.0 + n} for n in range(2)]
    [found] = curves([run(*first), run(*second, seed=1)], [])
    assert found["points"] == [
        {"step": 0, "mean": 2.0, "low": 1.0, "high": 3.0},
        {"step": 1, "mean": 2.5, "low": 1.0, "high": 4.0},
        {"step": 2, "mean": 1.0, "low": 1.0, "high": 1.0},
    ]


def test_the_ends_of_a_point_are_the_least_and_the_greatest_and_not_the_first_and_the_last():
    runs = [
        run(*({"event": "step", "step": n, "reward": value} for n in range(2)), seed=value) for value in (2.0, 9.0, 1.0, 4.0)
    ]
    [found] = curves(runs, [])
    assert found["points"][0] == {"step": 0, "mean": 4.0, "low": 1.0, "high": 9.0}


def test_a_value_of_nothing_is_a_point():
    steps = [{"event": "step", "step": n, "kl_sampler_trainer": 0.0} for n in range(2)]
    [found] = curves([run(*steps)], ["hot"])
    assert found["name"] == "KL(sampler‖trainer)" and [p["mean"] for p in found["points"]] == [0.0, 0.0]


def test_the_accuracy_over_the_steps_is_that_of_its_condition():
    events = [evaluation(n, hot={"accuracy": 0.1 * n}, clean={"accuracy": 0.9}) for n in range(2)]
    hot, clean = curves([run(*events)], ["hot", "clean", "none"])
    assert (hot["name"], [p["mean"] for p in hot["points"]]) == ("accuracy, hot", [0.0, 0.1])
    assert (clean["name"], [p["mean"] for p in clean["points"]]) == ("accuracy, clean", [0.9, 0.9])


# ---- σ


def test_sigma_before_the_layers_are_counted_and_after():
    text = "constant:0.05,multipliers=1:2"
    layers = [{"layer": n} for n in range(3)]
    counted = {"event": "mechanism", "conditions": [{"condition": "clean", "layers": layers}]}
    known, unknown = sigmas(run(counted, aqn=text, steps=2)), sigmas(run(aqn=text, steps=2))
    aqn = AQN.load(text)
    assert [line["label"] for line in unknown] == [g.label for g in aqn.groups(None)] == ["all other layers", "layer 1"]
    assert (
        [line["label"] for line in known] == [g.label for g in aqn.groups(3)] == ["layers 0+2 and outside of layers", "layer 1"]
    )
    assert [line["points"] for line in known] == [[[0, 0.05], [1, 0.05]], [[0, 0.1], [1, 0.1]]]
    nothing = {"event": "mechanism", "conditions": []}
    assert sigmas(run(nothing, aqn=text, steps=2)) == unknown


def test_sigma_follows_the_schedule_over_all_steps_of_the_run():
    [line] = sigmas(run(aqn="global_decay:0.05-0.01,stages=3", steps=6))
    schedule = AQN.load("global_decay:0.05-0.01,stages=3").schedule
    assert line["points"] == [[n, schedule.sigma(n, 6)] for n in range(6)]
    assert len({sigma for _, sigma in line["points"]}) > 1 and line["points"][-1] == [5, 0.01]
    assert sigmas(run(steps=6)) == [] == sigmas(run(aqn="constant:0.05"))


# ---- proof


def site(fault="gain:0.1", **facts):
    told = {"site": "layer.1", "fault": fault, "asked": 0.1, "matched": 1, "forward": 3, "backward": 2, "fused": 0}
    told |= {"measured_magnitude": 0.1, "measured_error": 0.2, "changed_fraction": 0.5, "survival_rate": None, "remark": None}
    return told | facts


def ledger(*sites):
    return {"sites": list(sites)}


def trained(told, **config):
    return run({"event": "finished", "ledgers": told}, **({"plan": "p"} | config))


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"measured_magnitude": None}, "proven"),
        ({"measured_magnitude": None, "changed_fraction": None}, "inert"),
        ({"asked": None, "changed_fraction": 0.0}, "inert"),
        ({"asked": None, "remark": "why"}, "proven"),
        ({"asked": 0.0, "measured_magnitude": 0.0}, "agrees"),
        ({"remark": "why"}, "differs"),
        ({"changed_fraction": 0.0}, "agrees"),
    ],
)
def test_a_proof_needs_what_was_asked_and_what_was_measured_or_a_change(facts, verdict):
    [row] = proof([trained({"plan": ledger(site(**facts))})])
    assert row["verdict"] == verdict


def test_a_plan_of_two_clauses_has_two_rows_in_their_order():
    rows = proof([trained({"plan": ledger(site("gain:0.1"), site("bias:0.2", site="layer.2"))})])
    assert [(r["fault"], r["site"], r["where"]) for r in rows] == [
        ("gain:0.1", "layer.1", "training: plan"),
        ("bias:0.2", "layer.2", "training: plan"),
    ]
    assert rows[0] == {
        "where": "training: plan", "fault": "gain:0.1", "site": "layer.1", "asked": 0.1, "measured": 0.1, "error": 0.2,
        "changed": 0.5, "survival": None, "forward": 3, "backward": 2, "verdict": "agrees", "remark": None,
    }  # fmt: skip


def test_runs_without_a_plan_are_not_asked_for_a_ledger():
    rows = proof([trained({"plan": ledger(site())}), trained({}, plan=None), trained({}, plan="")])
    assert [(r["verdict"], r["remark"], r["forward"]) for r in rows] == [("agrees", None, 3)]


def test_a_run_that_has_not_ended_has_no_ledger_and_proves_nothing_for_all():
    [row] = proof([trained({"plan": ledger(site())}), run(plan="p", seed=1)])
    assert (row["verdict"], row["remark"]) == ("inert", "1 of 2 runs have no ledger of it")
    assert proof([run(plan="p")]) == [] == proof([])


def test_a_score_under_a_plan_needs_its_ledger_and_a_clean_one_none():
    told = evaluation(1, clean={"plan": None, "ledger": None}, hot={"plan": "gain:0.1@layer.1", "ledger": ledger(site())})
    rows = proof([run(told), run(told, seed=1)])
    assert [(r["where"], r["verdict"], r["forward"]) for r in rows] == [("scored: hot", "agrees", 6)]
    bare = evaluation(1, hot={"plan": "gain:0.1@layer.1", "ledger": None})
    [row] = proof([run(told), run(bare, seed=1)])
    assert (row["where"], row["verdict"], row["remark"]) == ("scored: hot", "inert", "1 of 2 runs have no ledger of it")


def test_the_last_score_of_a_condition_is_the_one_that_is_proven():
    early = evaluation(0, hot={"plan": "p", "ledger": ledger(site(forward=100))})
    late = evaluation(4, hot={"plan": "p", "ledger": ledger(site(forward=7))})
    [row] = proof([run(early, late)])
    assert row["forward"] == 7


def test_a_ladder_without_rungs_met_no_plan():
    ends = {"event": "finished", "ledgers": {}}
    assert proof([run(ends, kind="harden", plans=["gain:0.1@layer.1"])]) == []
    told = {"event": "finished", "ledgers": {"gain:0.1@layer.1": ledger(site())}}
    whole = run({"event": "rung"}, told, kind="harden", plans=["gain:0.1@layer.1"])
    lost = run({"event": "rung"}, ends, kind="harden", plans=["gain:0.1@layer.1"])
    assert [(r["where"], r["verdict"]) for r in proof([whole])] == [("hardening: plan", "agrees")]
    assert [(r["verdict"], r["remark"]) for r in proof([whole, lost])] == [("inert", "1 of 2 runs have no ledger of it")]
    assert proof([run({"event": "rung"}, ends, kind="harden")]) == []
    bare = run(ends, kind="harden", plans=["gain:0.1@layer.1"])
    assert [(r["verdict"], r["remark"]) for r in proof([whole, bare])] == [("agrees", None)], (
        "it met no plan to have a ledger of"
    )


def test_training_comes_before_hardening_and_that_before_scores():
    everything = run(
        {"event": "rung"},
        evaluation(1, hot={"plan": "p", "ledger": ledger(site())}),
        {"event": "finished", "ledgers": {"plan": ledger(site()), "aqn": ledger(site()), "x": ledger(site())}},
        plan="p",
        aqn="constant:0.1",
        plans=["x"],
    )
    assert [r["where"] for r in proof([everything])] == [
        "training: plan", "training: AQN", "hardening: plan", "scored: hot",
    ]  # fmt: skip


# ---- mechanism, cost, samples


def test_the_mechanism_has_every_number_that_is_read_and_leaves_out_runs_without_any():
    def read(value):
        layer = {
            "layer": 4,
            **{n: value + i for i, n in enumerate(("rms", "kurtosis", "zeros", "survival", "survival_inside"))},
        }
        return {"event": "mechanism", "conditions": [{"condition": "hot", "layers": [layer | {"grad_norm": None}]}]}

    empty = {"event": "mechanism", "conditions": []}
    [found] = mechanism([run(empty), run(read(9.0), read(1.0), seed=1), run(seed=2), run(read(3.0), seed=3)])
    layer = {"layer": 4, "rms": 2.0, "kurtosis": 3.0, "zeros": 4.0, "survival": 5.0, "survival_inside": 6.0, "grad_norm": None}
    assert found == {"condition": "hot", "loss": None, "layers": [layer]}
    assert mechanism([run(empty)]) == []


def test_a_number_that_one_seed_lacks_is_the_mean_of_the_others():
    def read(**facts):
        layers = [{"layer": 0, **facts}]
        return run({"event": "mechanism", "conditions": [{"condition": "c", "loss": facts.get("rms"), "layers": layers}]})

    [found] = mechanism([read(rms=1.0), read(zeros=0.0), read(rms=5.0)])
    assert (found["loss"], found["layers"][0]["rms"], found["layers"][0]["zeros"]) == (3.0, 3.0, 0.0)


def test_the_cost_of_steps_that_were_not_timed_is_unknown():
    timed = {"event": "step", "step": 0, "seconds": 4.0, "sampling_seconds": 1.0}
    found = cost([run(timed, {"event": "step", "step": 1, "sampling_seconds": 50.0})])
    shares = {"sampling_share": 0.25, "injection_share": 0.0, "aqn_share": 0.0}
    assert found == {"seconds_per_step": 4.0, "evaluation_seconds": 0.0, **shares}
    bare = cost([run({"event": "step", "step": 0, "reward": 1.0})])
    assert bare == {"seconds_per_step": None, "evaluation_seconds": 0.0, **dict.fromkeys(shares)}
    assert cost([run({"event": "step", "step": 0, "seconds": 0.0})])["aqn_share"] is None


def test_the_time_of_scores_is_that_of_all_evaluations_a_run():
    first = run(evaluation(0, a={"seconds": 1.0}, b={"seconds": 2.0}), evaluation(5, a={"seconds": 4.0}))
    second = run(evaluation(5, a={"seconds": 3.0}), seed=1)
    assert cost([first, second])["evaluation_seconds"] == 5.0
    assert cost([first, second, run(seed=2)])["evaluation_seconds"] == pytest.approx(10 / 3)


def test_samples_are_of_the_first_run_that_has_both_questions_and_answers():
    def asked(word):
        return {"event": "examples", "problems": [{"id": "p1", "question": f"{word}?", "answer": "a"}]}

    answers = evaluation(1, hot=answered(1, 0))
    runs = [run(), run(asked("none")), run(answers), run(asked("second"), answers), run(asked("third"), answers)]
    wanted = {"condition": "hot", "id": "p1", "question": "second?", "answer": "a", "text": "t1", "correct": False}
    assert samples(runs) == [wanted]
    assert samples(runs[:3]) == []


def test_samples_are_the_answers_after_the_last_step():
    asked = {"event": "examples", "problems": [{"id": "p0", "question": "?", "answer": "a"}]}
    found = samples([run(asked, evaluation(0, hot=answered(0)), evaluation(4, hot=answered(1), own=answered(0)))])
    assert [(s["condition"], s["correct"]) for s in found] == [("hot", True), ("own", False)]

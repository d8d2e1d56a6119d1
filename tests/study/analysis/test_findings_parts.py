"""The parts of a study's findings that need no run: settings, notes, environments, conditions on a line."""

import pytest

from shaketable.study.analysis.findings import (
    _aqn,
    _damage,
    _elsewhere,
    _marked,
    _no_number,
    _not_the_same,
    _settings,
    _steps,
    _study,
    _unverified,
    environments,
    magnitudes,
    robustness,
    run_facts,
)
from shaketable.study.analysis.runs import Run
from shaketable.study.arm_config import Arm, Guide
from shaketable.study.cells import STEPS, cells_of
from tests.study.small_studies import FAULTY, NOISE, study

ALONE = {"compare": {}, "diagnose": {"tokens": 32}}


def run(name="x", *events, arm="arm", status="done", **more):
    return Run(name, more.pop("kind", "train"), arm, 0, status, more.pop("head", {}), [*events], **more)


def one_arm(**fields):
    return study(arms={"only": fields}, **ALONE)


def test_a_study_says_what_its_file_says():
    asked = study(origin="E5", engine={"kind": "ray"})
    assert _study(asked) == {
        "name": "small",
        "question": "Does noise help?",
        "origin": "E5",
        "model": "nano",
        "task": "arithmetic",
        "seeds": [0, 1],
        "steps": 4,
        "options": "prompts 2, samples 4, save_every 2, lr 0.001, temperature 1.5",
        "n": 12,
        "conditions": [{"name": "clean", "plan": None}, {"name": "faulty", "plan": FAULTY}, {"name": "noise", "plan": NOISE}],
        "primary": {"a": "noise + AQN", "b": "noise", "condition": "noise", "endpoint": "accuracy"},
        "engine": "ray",
        "command": "shaketable study run small.yaml",
        "key": cells_of(asked)[-1].key,
    }
    bare = _study(study(seeds=0, arms={"a": {"train": False, "plan": NOISE}}, **ALONE))
    assert (bare["key"], bare["primary"]) == ("", None)
    assert bare["conditions"][-1] == {"name": "own", "plan": "the plan and the noise of each arm"}


@pytest.mark.parametrize(
    ("replaced", "steps"),
    [
        ({}, 4),
        ({"train": {}}, STEPS),
        ({"arms": {"a": {"harden": {}, "plan": NOISE}}, "harden": {"steps": 7}, **ALONE}, 7),
        ({"arms": {"a": {"train": False}}, "harden": {"steps": 7}, **ALONE}, 0),
        ({"arms": {"a": {"harden": {}, "plan": NOISE}, "b": {}}, "compare": {"primary": {"a": "a", "b": "b", "condition": "clean"}}}, 4),
    ],
)  # fmt: skip
def test_steps_are_those_of_training_or_else_of_hardening(replaced, steps):
    assert _steps(study(**replaced)) == steps


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"plan": NOISE}, []),
        ({"plan": NOISE, "plan_in": "rollout"}, ["faults in rollouts only"]),
        ({"plan": NOISE, "plan_in": "loss"}, ["faults in the loss only"]),
        ({"model": "nano"}, []),
        ({"model": "other/model"}, ["model other/model"]),
        ({"task": "gsm8k"}, ["task gsm8k"]),
        ({"overrides": {"lr": 0.5, "steps": 3}}, ["lr 0.5", "steps 3"]),
        ({"harden": {"rungs": []}, "plan": NOISE}, ["rungs none"]),
        ({"harden": {"rungs": ["calibrate", "distil"]}, "plan": NOISE}, ["rungs calibrate + distil"]),
        ({"train": False, "skip_layers": [3, 5]}, ["layer 3, 5 not run"]),
    ],
)
def test_settings_are_what_an_arm_has_that_is_not_the_studys(fields, said):
    whole = study(arms={"only": {}}, **ALONE)
    assert _settings(whole, Arm(**fields)) == said


def test_noise_is_told_as_a_run_had_it_and_else_as_it_was_asked_for():
    had = run(head={"config": {"aqn": "constant:0.2"}})
    bare = run(head={"config": {"aqn": None}})
    guided, plain = Arm(plan=NOISE, aqn=Guide(guide="fault")), Arm(aqn="constant:0.1")
    assert _aqn(guided, [bare, had]) == "constant:0.2" == _aqn(plain, [had])
    assert (_aqn(guided, []), _aqn(plain, []), _aqn(Arm(), [bare])) == (None, "constant:0.1", None)


def test_a_run_is_one_line_of_the_table():
    events = [
        {"event": "attempt", "time": 10.0}, {"event": "warning", "text": "slow", "time": 11.0}, {"event": "resumed", "time": 12.0},
        {"event": "attempt", "time": 13.0}, {"event": "added", "how": "verl", "path": "a/b", "time": 14.0}, {"event": "step"},
    ]  # fmt: skip
    found = run_facts(run("name", *events, head={"id": "abc"}, error="why", sha="12", verified=False, status="failed"))
    assert found == {
        "name": "name", "kind": "train", "arm": "arm", "seed": 0, "status": "failed", "id": "abc", "sha": "12", "verified": False,
        "folder": "runs/name", "attempts": 2, "resumed": 1, "seconds": 4.0, "error": "why",
        "warnings": ["made elsewhere: verl, a/b", "slow"],
    }  # fmt: skip


@pytest.mark.parametrize(("times", "seconds"), [([], None), ([5.0], None), ([5.0, 5.0], 0.0), ([5.0, 4.0], None), ([1.0, 9.0, 8.0], None)])  # fmt: skip
def test_a_clock_that_was_set_back_tells_no_time(times, seconds):
    assert run_facts(run("x", *({"event": "step", "time": t} for t in times)))["seconds"] == seconds


LINE = {"clean": None, "a": "gain:0.2@layer.1", "b": "gain:0.1@layer.1"}


@pytest.mark.parametrize(
    "other",
    [
        {"b": "gain:0.1@layer.2"},
        {"b": "gain:0.1,sparsity=0.5@layer.1"},
        {"b": "bias:0.1@layer.1"},
        {"b": "gain:0.1@layer.1;gain:0.1@layer.1"},
        {"a": "mxfp4@layer.1", "b": "mxfp4@layer.1"},
    ],
)
def test_conditions_that_differ_in_anything_else_are_on_no_line(other):
    assert magnitudes(LINE) == {"clean": 0.0, "a": 0.2, "b": 0.1}
    assert magnitudes(LINE | other) == {"clean": None, "a": None, "b": None}


def test_two_conditions_are_no_line():
    assert magnitudes({"clean": None, "a": LINE["a"]}) == {"clean": None, "a": None}


def scored(**correct):
    conditions = [{"name": n, "answers": [{"correct": c} for c in row]} for n, row in correct.items()]
    return run("x", {"event": "evaluation", "step": 1, "conditions": conditions})


def test_scores_along_a_line_are_in_its_order_and_an_arm_of_one_score_is_left_out():
    done = {"one": [scored(clean=[1, 1], a=[0, 0], b=[1, 0])], "two": [scored(clean=[1, 0])], "none": []}
    [row] = robustness(LINE, done)
    assert row["arm"] == "one"
    assert [(p["label"], p["condition"], p["x"], p["mean"]) for p in row["points"]] == [
        ("clean", "clean", 0.0, 1.0),
        ("b", "b", 0.1, 0.5),
        ("a", "a", 0.2, 0.0),
    ]
    assert all(p["low"] <= p["mean"] <= p["high"] and p["low"] < p["high"] for p in row["points"])
    [beside] = robustness({"clean": None, "a": LINE["a"]}, done)
    assert [(p["label"], p["x"]) for p in beside["points"]] == [("clean", None), ("a", None)]


def test_environments_are_counted_and_each_is_told_once():
    here, there = {"python": "3"}, {"python": "4"}
    runs = [run(head={"environment": facts}) for facts in (here, there, here)] + [run(head={})]
    assert environments(runs) == [{"runs": 2, "facts": here}, {"runs": 1, "facts": there}]


def test_runs_that_began_with_other_weights_or_tests_are_named_by_what_differs():
    def made(model="nano", task="arithmetic", **hashes):
        return run("x", {"event": "made_of", **hashes}, head={"config": {"model": model, "task": task}})

    same = [
        made(weights="a", tests="b"),
        made(weights="a", tests="b"),
        made(model="other", weights="c"),
        run(head={"config": {}}),
    ]
    assert _not_the_same(same) == []
    why = "were not the same in all runs: their differences mean nothing"
    assert _not_the_same([*same, made(weights="z", tests="b")]) == [f"the weights of nano {why}"]
    assert _not_the_same([*same, made(weights="a", tests="z")]) == [f"the test problems of arithmetic {why}"]
    assert _not_the_same([*same, made(task="gsm8k", weights="a", tests="z")]) == []


@pytest.mark.parametrize(("arm", "marked"), [("a", True), ("b", True), ("c", False)])
def test_a_comparison_with_unverified_records_says_so(arm, marked):
    compared = {"a": "a", "b": "b", "sentence": "It is so."}
    found = _marked(compared, [run(arm=arm)])
    assert found == compared | ({"sentence": "It is so. (From unverified records.)"} if marked else {})
    assert compared["sentence"] == "It is so."


@pytest.mark.parametrize(("count", "more"), [(1, ""), (12, ""), (13, ", and 1 more"), (15, ", and 3 more")])
def test_unverified_runs_are_named_up_to_twelve(count, more):
    runs = [run(f"r{i}") for i in range(count)]
    names = ", ".join(f"r{i}" for i in range(min(count, 12))) + more
    why = "their records have no chain, and nobody can say whether their numbers were changed"
    assert _unverified(runs, [*runs, run()]) == [f"{count} of {count + 1} runs are unverified, {why}: {names}"]
    assert _unverified([], runs) == []


def test_runs_that_were_made_elsewhere_are_named_and_those_without_a_ledger_twice():
    runs = [run("a", {"event": "added", "ledger": "sha"}), run("b", {"event": "added", "ledger": False}), run("c")]
    why = "have no ledger: nothing but the one who added them says that no fault acted in them"
    assert _elsewhere(runs) == ["2 of 3 runs were made elsewhere and added: a, b", f"b {why}"]
    assert _elsewhere(runs[:1]) == ["1 of 1 runs were made elsewhere and added: a"] and _elsewhere(runs[2:]) == []


def test_damaged_runs_and_losses_that_are_no_numbers_are_left_out_and_named():
    def evaluated(status="done", **conditions):
        rows = [{"name": name, **fields} for name, fields in conditions.items()]
        return run("r", {"event": "evaluation", "conditions": rows}, status=status)

    assert _damage([run("d", status="damaged", error="torn"), run("e", status="failed", error="no")]) == [
        "d is left out: torn; move its folder away to have it done again"
    ]
    broken = evaluated(hot={"loss": None}, clean={"loss": 1.0}, own={})
    assert _no_number([broken, evaluated("partial", hot={"loss": None}), run()]) == [
        "r is left out of comparisons of loss under hot: its loss is not finite"
    ]

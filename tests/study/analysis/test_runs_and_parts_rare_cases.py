"""Rare cases of the smaller parts: runs that somebody works on, noise of guided arms, shares, verdicts, holes of findings."""

import json

import pytest

from shaketable.aqn.guidance import Guidance
from shaketable.errors import ShaketableError
from shaketable.io.locks import held
from shaketable.records.chain import UNCHAINED
from shaketable.records.record import FILE, RunRecord
from shaketable.study.analysis.diagnoses import diagnosis
from shaketable.study.analysis.findings import (
    _elsewhere,
    _no_number,
    _not_the_same,
    _settings,
    magnitudes,
    robustness,
    run_facts,
)
from shaketable.study.analysis.recovered import recovered, told
from shaketable.study.analysis.report_data import complete, visible
from shaketable.study.analysis.runs import Run
from shaketable.study.analysis.verdict import verdict
from shaketable.study.arm_config import Arm
from shaketable.study.cells import Cell, cells_of
from shaketable.study.config import Comparing
from tests.study.small_studies import NOISE, study

CELL = next(c for c in cells_of(study()) if c.arm == "noise" and c.seed == 0)


def run(*events, status="done", head=None, kind="train", **more):
    return Run("x", kind, "arm", 0, status, head or {}, [*events], **more)


# ---- runs


def begun(runs, *events, old=False):
    if old:
        head = {"schema": UNCHAINED, "event": "run", "verb": "train", "config": CELL.config, "about": CELL.about("small")}
        (runs / CELL.name).mkdir()
        lines = [head, *({"event": event} for event in events)]
        (runs / CELL.name / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunRecord.open(runs / CELL.name)
    record = RunRecord.create(runs / CELL.name, "train", CELL.config, {}, CELL.about("small"))
    for event in events:
        record.append(event, **({"error": 5} if event == "failed" else {}))
    return record


@pytest.mark.parametrize(("events", "idle"), [((), "partial"), (("attempt",), "partial"), (("failed",), "failed")])
def test_a_run_that_somebody_works_on_is_running(tmp_path, events, idle):
    begun(tmp_path, *events)
    assert Run.of(CELL, tmp_path).status == idle
    with held(tmp_path, CELL.name):
        found = Run.of(CELL, tmp_path)
        assert (found.status, found.error, found.is_done) == ("running", None, False)
        assert [e["event"] for e in found.events] == ["run", *events] and found.head["verb"] == "train"


def test_a_run_whose_record_is_not_there_yet_is_running_while_its_lock_is_held(tmp_path):
    with held(tmp_path, CELL.name):
        assert Run.of(CELL, tmp_path).status == "running"
    assert Run.of(CELL, tmp_path).status == "missing"


def test_a_training_run_alone_is_running_while_somebody_is_inside(tmp_path):
    record = begun(tmp_path, "attempt")
    with record.alone():
        assert Run.alone(tmp_path / CELL.name).status == "running"
    assert Run.alone(tmp_path / CELL.name).status == "partial"


def test_the_reason_of_a_failure_is_a_text(tmp_path):
    begun(tmp_path, "failed")
    assert (Run.of(CELL, tmp_path).error, Run.alone(tmp_path / CELL.name).error) == ("5", "5")


def test_a_run_without_a_chain_is_unverified_and_has_no_sha_without_a_seal(tmp_path):
    begun(tmp_path, "finished", old=True)
    for found in (Run.of(CELL, tmp_path), Run.alone(tmp_path / CELL.name)):
        assert (found.status, found.verified, found.sha) == ("done", False, None)


def test_a_run_that_is_sealed_has_the_sha_of_its_last_line(tmp_path):
    record = begun(tmp_path, "attempt", "finished")
    for found in (Run.of(CELL, tmp_path), Run.alone(tmp_path / CELL.name)):
        assert (found.status, found.verified, found.sha) == ("done", True, record.sealed()["sha"])


def test_a_record_of_another_run_in_the_place_of_a_cell_is_damaged(tmp_path):
    RunRecord.create(tmp_path / CELL.name, "train", {}, {}, CELL.about("small") | {"key": "other"}).append("finished")
    found = Run.of(CELL, tmp_path)
    assert (found.status, found.head, found.events, found.sha) == ("damaged", {}, [], None)
    assert found.error == f"{tmp_path / CELL.name} holds another run than its name says; move it away"
    assert (found.name, found.kind, found.arm, found.seed) == (CELL.name, "train", "noise", 0)


def test_a_record_of_another_verb_is_no_training_run(tmp_path):
    RunRecord.create(tmp_path / "run", "harden", {"seed": 0}, {})
    with pytest.raises(ShaketableError, match="holds no run of `shaketable train`"):
        Run.alone(tmp_path / "run")


def test_what_a_resume_voided_is_no_part_of_a_run(tmp_path):
    record = begun(tmp_path)
    record.append("step", step=1, reward=1.0, seconds=2.0)
    record.append("step", step=2, reward=9.0, seconds=9.0)
    record.resumed(1)
    record.append("step", step=2, reward=3.0, seconds=4.0)
    found = Run.of(CELL, tmp_path)
    assert [s["reward"] for s in found.of_kind("step")] == [1.0, 3.0] and found.value("seconds_per_step") == 3.0
    assert found.value("reward") == 3.0


def test_a_configuration_is_a_copy():
    head, resolved = {"config": {"a": 1}}, {"event": "resolved", "config": {"a": 2}}
    for found in (run(head=head), run(resolved, head=head)):
        found.config["a"] = 9
        assert found.config["a"] != 9
    assert head == {"config": {"a": 1}} and resolved["config"] == {"a": 2}


def test_the_last_configuration_that_was_resolved_counts():
    first, second = ({"event": "resolved", "config": {"a": n}} for n in (1, 2))
    assert run(first, second).config == {"a": 2}


def test_scores_are_numbers_and_a_single_one_that_is_missing_takes_all():
    def scored(*values):
        rows = [{"correct": v} for v in values]
        return run({"event": "evaluation", "conditions": [{"name": "hot", "answers": rows}]})

    assert scored(True, False).scores("hot", "accuracy") == [1.0, 0.0]
    assert all(type(v) is float for v in scored(True, 0).scores("hot", "accuracy"))
    assert scored(True, None).scores("hot", "accuracy") == [] == scored().scores("hot", "accuracy")
    assert scored(True).scores("hot", "formatted") == []


def test_times_are_medians_and_shares_are_of_the_whole_time():
    steps = [{"event": "step", "seconds": s, "aqn_seconds": a} for s, a in ((10.0, 1.0), (2.0, 1.0), (3.0, 1.0), (5.0, 0.0))]
    assert run(*steps).value("seconds_per_step") == 4.0 and run(*steps).value("aqn_share") == 3 / 20


def test_the_facts_of_a_run_without_a_record():
    assert run_facts(Run("x", "train", "arm", 3, "missing", {}, [])) == {
        "name": "x", "kind": "train", "arm": "arm", "seed": 3, "status": "missing", "id": None, "sha": None, "verified": True,
        "folder": "runs/x", "attempts": 0, "resumed": 0, "seconds": None, "error": None, "warnings": [],
    }  # fmt: skip


# ---- diagnoses

STATISTICS = {"gain": 0.9, "kurtosis": 2.0, "instability": 0.0}
FOUND = {
    "schema": 1, "kind": "diagnosis", "model": "nano", "device": "cpu", "date": "2026-01-01", "num_layers": 3, "verdict": "FAULT",
    "layer": 1, "sentence": "FAULT: …", "fault_class": "dead_zone",
    "probes": [{"layer": n, "results": {"replay": {"status": "pass"}}, "statistics": STATISTICS} for n in range(3)],
}  # fmt: skip
GUIDE = {"guide": "all", "sigma": 0.04, "schedule": "global_decay"}
RULES = Guidance.of(FOUND, target="all", base_sigma=0.04, schedule="global_decay").layers


def cell(needs="d", guide=GUIDE, seed=0):
    return Cell("train", "targeted", seed, {}, 1, guide, needs)


def shown(cells, *runs):
    located = Run(
        "d",
        "locate",
        None,
        None,
        "done",
        {"config": {"plan": "p", "model": "nano"}},
        [{"event": "diagnosis", "diagnosis": FOUND}],
    )
    return diagnosis(located, cells, runs)["sigmas"]


def noisy(of, aqn, status="done"):
    return Run(of.name, "train", "targeted", of.seed, status, {"config": {"aqn": aqn}}, [])


def test_the_noise_of_a_run_that_is_what_the_rules_give_has_their_reasons():
    factor = RULES[1].sigma / 0.04
    found = shown([cell()], noisy(cell(), f"constant:0.04,layers=0-2,multipliers=1:{factor!r}"))
    assert found == [{"layer": r.layer, "sigma": r.sigma, "label": r.label, "why": list(r.why)} for r in RULES]
    assert factor > 1 and [r.sigma for r in RULES] == [0.04, RULES[1].sigma, 0.04]


def test_layers_that_a_run_had_no_noise_at_are_shown_by_the_rules():
    found = shown([cell()], noisy(cell(), "constant:0.04,layers=1,multipliers=1:0.5"))
    assert [row["sigma"] for row in found] == [0.04, pytest.approx(0.02), 0.04]
    why = f"the rules of that time; those of today give {RULES[1].sigma:.4g}"
    assert found[1] == {"layer": 1, "sigma": pytest.approx(0.02), "label": "", "why": [why]}
    assert found[0]["label"] == RULES[0].label


def test_a_layer_with_noise_and_no_factor_had_the_base():
    [_, row, _] = shown([cell()], noisy(cell(), "constant:0.04,layers=1"))
    assert (row["sigma"], row["label"]) == (0.04, "") and RULES[1].sigma > 0.04


def test_a_difference_of_one_in_a_thousand_is_one():
    factor = 1.001 * RULES[1].sigma / 0.04
    [_, row, _] = shown([cell()], noisy(cell(), f"constant:0.04,layers=1,multipliers=1:{factor!r}"))
    assert row["label"] == "" and row["sigma"] == pytest.approx(1.001 * RULES[1].sigma)


def test_noise_everywhere_says_nothing_of_single_layers():
    assert [row["sigma"] for row in shown([cell()], noisy(cell(), "constant:0.04"))] == [r.sigma for r in RULES]


def test_noise_is_asked_of_finished_runs_that_this_diagnosis_guides():
    text, other = "constant:0.04,layers=0,multipliers=0:3", cell("another", seed=5)
    assert shown([cell(), other], noisy(other, text))[0]["sigma"] == 0.04
    assert shown([cell()], noisy(cell(), text, "failed"))[0]["sigma"] == 0.04
    assert shown([cell(), cell(seed=1)], noisy(cell(seed=1), text))[0]["sigma"] == pytest.approx(0.12)
    assert shown([cell(guide=None)], noisy(cell(), text)) == [] == shown([])


def test_the_base_is_that_of_the_guide():
    found = shown([cell(guide=GUIDE | {"sigma": 0.02})], noisy(cell(guide=GUIDE | {"sigma": 0.02}), "constant:0.02,layers=2"))
    assert [row["sigma"] for row in found] == [
        r.sigma for r in Guidance.of(FOUND, base_sigma=0.02, schedule="epoch_aware").layers
    ]


# ---- what came back


def evaluation(step, **conditions):
    rows = [{"name": n, "answers": [{"correct": bool(c)} for c in row]} for n, row in conditions.items()]
    return {"event": "evaluation", "step": step, "conditions": rows}


def hardened(*evaluations, seconds=(2.0,), kind="harden"):
    return run(*evaluations, *({"event": "rung", "cost": {"seconds": s}} for s in seconds), kind=kind)


BEFORE, AFTER = {"clean": [1, 1, 1, 0], "hot": [0, 0, 1, 0]}, {"clean": [1, 1, 0, 0], "hot": [1, 0, 1, 0]}


def test_clean_is_no_fault_and_has_no_share():
    worse = hardened(evaluation(0, **BEFORE), evaluation(1, **AFTER))
    assert [row["condition"] for row in recovered(["clean", "hot"], {"arm": [worse]})] == ["hot"]


@pytest.mark.parametrize("name", ["clean", "hot"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_run_that_lacks_one_of_the_four_scores_does_not_count(name, where):
    rows = [dict(BEFORE), dict(AFTER)]
    del rows[where][name]
    holed = hardened(evaluation(0, **rows[0]), evaluation(1, **rows[1]))
    assert recovered(["hot"], {"arm": [holed]}) == []
    whole = hardened(evaluation(0, **BEFORE), evaluation(1, **AFTER))
    [row] = recovered(["hot"], {"arm": [holed, whole]})
    assert (row["seeds"], row["problems"]) == (1, 4)


def test_the_time_of_a_repair_is_of_the_runs_that_had_one():
    whole = [evaluation(0, **BEFORE), evaluation(1, **AFTER)]
    [row] = recovered(["hot"], {"arm": [hardened(*whole, seconds=(1.0, 2.0)), hardened(*whole, seconds=(7.0,)), run()]})
    assert row["seconds"] == 5.0 and row["share"] == pytest.approx(0.5)


def test_rows_are_by_arm_and_then_by_condition():
    whole = hardened(evaluation(0, cold=[0, 0, 0, 0], **BEFORE), evaluation(1, cold=[1, 1, 1, 1], **AFTER))
    rows = recovered(["clean", "hot", "cold"], {"one": [whole], "two": [whole], "none": []})
    assert [(r["arm"], r["condition"]) for r in rows] == [("one", "hot"), ("one", "cold"), ("two", "hot"), ("two", "cold")]
    assert recovered(iter(["hot"]), {"one": [whole]})[0]["condition"] == "hot"
    assert told(rows, Comparing(a="two", b="one", condition="cold")).startswith(
        "Of the 75.0 points that the fault takes, 100.0"
    )
    assert told([], Comparing(a="two", b="one", condition="cold")) == ""


# ---- the first thing a report says


def compared(**changes):
    facts = {"a": "AQN", "b": "none", "condition": "hot", "endpoint": "accuracy", "unit": "points", "scale": 100.0}
    facts |= {"difference": 0.1, "seeds": 5, "primary": True, "verdict": "shown", "sentence": "S."}
    return facts | changes


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"a": "the Arm", "b": "Other One"}, "Shown: the Arm is 10 points above Other One in hot accuracy"),
        ({"difference": -0.00123}, "Shown: AQN is 0.123 points below none in hot accuracy"),
        ({"difference": 12.3456, "scale": 1.0, "unit": "nats", "endpoint": "loss"}, "Shown: AQN is 12.3 nats above none in hot loss"),
        (
            {"condition": None, "endpoint": "aqn_share", "verdict": "not shown"},
            "Not shown: no difference between AQN and none in aqn share could be told from chance",
        ),
    ],
)  # fmt: skip
def test_a_headline_keeps_the_names_as_they_are_written(changes, headline):
    assert verdict([compared(**changes)], [run()], [])["headline"] == headline


def test_a_headline_of_missing_and_unverified_runs_says_both():
    runs = [run(verified=False), run(status="failed")]
    said = verdict([compared()], runs, [])
    assert said["headline"] == (
        "So far (1 of 2 runs are missing): shown: AQN is 10 points above none in hot accuracy (from unverified records)"
    )
    assert said["kind"] == "shown" and said["sentence"] == "S."


def test_the_first_primary_comparison_decides():
    said = verdict([compared(primary=False), compared(verdict="not shown"), compared()], [run()], [])
    assert said["kind"] == "not shown"


# ---- holes of findings


@pytest.mark.parametrize("value", [0, 0.0, False, ""])
def test_a_value_of_nothing_is_no_hole(value):
    assert complete({"comparisons": [{"p": value}]})["comparisons"][0]["p"] == value
    assert complete({"runs": [{"verified": value}]})["runs"][0]["verified"] == value
    assert complete({"study": {"steps": value}})["study"]["steps"] == value


def test_keys_that_no_shape_knows_stay_and_are_made_visible():
    found = complete(
        {"more": 1, "study": {"extra": "a\u202eb"}, "arms": [{"own\x07": 2}], "environments": [{"facts": {"x": [1]}}]}
    )
    assert found["more"] == 1 and found["study"]["extra"] == "a⟨U+202E⟩b" and found["arms"][0]["own⟨U+0007⟩"] == 2
    assert found["environments"] == [{"facts": {"x": [1]}, "runs": None}]


def test_holes_inside_of_lists_and_objects_that_are_null_are_filled():
    found = complete({"study": None, "arms": [None, {"scores": [{}], "cost": None}], "verdict": None, "notes": None})
    assert found["study"]["name"] == "" and found["verdict"] == {"kind": "nothing", "headline": "", "sentence": ""}
    assert [arm["name"] for arm in found["arms"]] == ["", ""] and found["notes"] == []
    assert found["arms"][1]["scores"][0]["endpoint"] == "accuracy" and found["arms"][1]["cost"]["aqn_share"] is None
    assert set(found["arms"][1]["cost"].values()) == {None} and found["arms"][0]["seeds"] == []


def test_what_is_filled_is_no_part_of_the_next_findings():
    complete({})["notes"].append("mine")
    complete({"arms": [{}]})["arms"][0]["seeds"].append(3)
    assert complete({})["notes"] == [] and complete({"arms": [{}]})["arms"][0]["seeds"] == []


def test_findings_themselves_are_left_as_they_are():
    given = {"notes": ["\x07"], "arms": [{}]}
    complete(given)
    assert given == {"notes": ["\x07"], "arms": [{}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x00", "⟨U+0000⟩"),
        ("\t\n", "\t\n"),
        ("\r", "⟨U+000D⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("a\x1bb\x1b", "a⟨U+001B⟩b⟨U+001B⟩"),
    ],
)
def test_a_character_that_acts_is_its_code_in_four_digits_or_more(text, shown):
    assert visible(text) == shown


# ---- parts of findings


def test_settings_tell_what_a_trained_arm_goes_on_from_and_all_in_one_order():
    arms = {"fixed": {"harden": {}, "plan": NOISE}, "b": {}}
    whole = study(arms=arms, compare={"primary": {"a": "b", "b": "fixed", "condition": "clean"}})
    arm = Arm(plan=NOISE, plan_in="loss", overrides={"lr": 0.5}, after="fixed", model="m", task="t")
    assert _settings(whole, arm) == ["faults in the loss only", "lr 0.5", "after fixed", "model m", "task t"]


def test_places_on_a_line_are_in_the_order_of_their_magnitude():
    names = {"z": "gain:0.5@layer.1", "clean": None, "b": "gain:0.05@layer.1", "a": "gain:1.5@layer.1"}
    rows = [{"name": n, "answers": [{"correct": True}, {"correct": n == "clean"}]} for n in names]
    [found] = robustness(names, {"arm": [run({"event": "evaluation", "conditions": rows})]})
    assert [(p["label"], p["x"]) for p in found["points"]] == [("clean", 0.0), ("b", 0.05), ("z", 0.5), ("a", 1.5)]
    [beside] = robustness(names | {"a": "bias:1.5@layer.1"}, {"arm": [run({"event": "evaluation", "conditions": rows})]})
    assert [(p["label"], p["x"]) for p in beside["points"]] == [(n, None) for n in names]
    assert [(p["low"] <= p["mean"] <= p["high"]) for p in found["points"]] == [True] * 4


@pytest.mark.parametrize(
    ("conditions", "line"),
    [
        ({"clean": None, "a": "gain:0.1@layer.1", "b": "gain:0.2@layer.1"}, True),
        ({"a": "gain:0.1@layer.1", "b": "gain:0.2@layer.1", "c": "gain:0.3@layer.1"}, True),
        ({"a": "gain:0.1@layer.1", "b": "gain:0.2@layer.1"}, False),
        ({"clean": None, "own": None, "a": "gain:0.1@layer.1"}, True),
        ({"clean": None, "own": None, "third": None}, False),
        ({"clean": None, "a": "gain:0.1@layer.1;gain:0.2@layer.2", "b": "gain:0.2@layer.1;gain:0.2@layer.2"}, False),
    ],
)
def test_three_conditions_of_one_fault_at_one_site_are_a_line(conditions, line):
    assert (None not in magnitudes(conditions).values()) is line and list(magnitudes(conditions)) == list(conditions)


def test_weights_are_compared_by_the_model_that_was_resolved():
    def made(model, resolved, weights):
        events = [{"event": "made_of", "weights": weights}, {"event": "resolved", "config": {"model": resolved, "task": "t"}}]
        return run(*events, head={"config": {"model": model, "task": "t"}})

    assert _not_the_same([made("a", "x", "1"), made("b", "x", "2")]) == [
        "the weights of x were not the same in all runs: their differences mean nothing"
    ]
    assert _not_the_same([made("a", "x", "1"), made("a", "y", "2")]) == []


def test_the_last_weights_of_a_run_count():
    events = [{"event": "made_of", "tests": n} for n in ("1", "2")]
    head = {"config": {"model": "m", "task": "t"}}
    assert _not_the_same([run(*events, head=head), run(events[1], head=head)]) == []


def test_names_of_runs_without_a_ledger_are_joined():
    def added(name, ledger):
        return Run(name, "added", "arm", 0, "done", {}, [{"event": "added", "ledger": ledger}])

    first, second = _elsewhere([added("a", None), added("b", "sha"), added("c", ""), run()])
    assert first == "3 of 4 runs were made elsewhere and added: a, b, c"
    assert second.startswith("a, c have no ledger: nothing but the one who added them says")


def test_a_loss_that_is_no_number_is_told_for_each_condition_of_the_last_evaluation():
    def scored(**losses):
        return {"event": "evaluation", "conditions": [{"name": n, "loss": v} for n, v in losses.items()]}

    found = _no_number([run(scored(a=None, b=None, c=None), scored(a=None, b=0.0, c=None))])
    assert [note.split(":")[0] for note in found] == [f"x is left out of comparisons of loss under {n}" for n in "ac"]


def test_what_an_arm_repeats_of_its_study_is_no_setting_of_its_own():
    whole = study()
    assert _settings(whole, Arm(model=whole.model, task=whole.task)) == []
    assert _settings(whole, Arm(model="other", task=whole.task)) == ["model other"]
    assert _settings(whole, Arm(model=whole.model, task="other")) == ["task other"]


def test_a_run_that_has_no_record_yet_and_is_worked_on_is_running(tmp_path):
    assert Run.of(CELL, tmp_path).status == "missing"
    with held(tmp_path, CELL.name):
        assert Run.of(CELL, tmp_path).status == "running"

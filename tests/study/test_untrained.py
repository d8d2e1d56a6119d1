"""Arms that are not trained, with a plan and noise of their own, and the loss as endpoint."""

import pytest

from shaketable.report.study_html import page
from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.results import Findings
from shaketable.study.cells import cells_of
from shaketable.study.file import parse_study
from shaketable.study.forecast import check
from shaketable.study.run_cell import do
from tests.study.small_studies import findings

ZONE = "dead_zone:0.6,scope=token@layer.3"
LOSS = {"condition": "own", "endpoint": "loss"}
ARMS = {
    "clean": {"train": False},
    "dead zone": {"train": False, "plan": ZONE},
    "after": {"train": False, "plan": ZONE, "aqn": "constant:0.5,form=output,layers=3,unit=absolute"},
    "before": {"train": False, "plan": ZONE, "aqn": "constant:0.5,form=output,layers=3,unit=absolute,order=before"},
    "guided": {"train": False, "plan": ZONE, "aqn": {"guide": "fault", "sigma": 0.02, "form": "output"}},
}


def untrained(**replaced):
    asked = {
        "study": "untrained",
        "question": "q?",
        "model": "nano",
        "task": "arithmetic",
        "seeds": 2,
        "evaluate": {"n": 12, "loss": True},
        "arms": ARMS,
        "diagnose": {"tokens": 32},
        "compare": {"primary": {"a": "before", "b": "after", **LOSS}, "secondary": [{"a": "dead zone", "b": "clean", **LOSS}]},
    }
    return parse_study(asked | replaced)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, study = tmp_path_factory.mktemp("untrained"), untrained()
    check(study)
    for cell in cells_of(study):
        assert do(cell, study.study, folder / "runs", "test") == "done"
    return findings(study, folder)


def losses(found, arm, condition="own"):
    arm = next(a for a in found["arms"] if a["name"] == arm)
    score = next(s for s in arm["scores"] if (s["condition"], s["endpoint"]) == (condition, "loss"))
    assert score["unit"] == "nats" and score["ci_low"] <= score["mean"] <= score["ci_high"]
    return [row["value"] for row in score["per_seed"]]


def test_an_arm_has_its_plan_and_its_noise_on_under_own_and_nowhere_else(found):
    assert losses(found, "clean") == losses(found, "clean", "clean") == losses(found, "dead zone", "clean")
    assert len({*losses(found, "dead zone")}) == 1, "a dead zone draws nothing"
    assert len({*losses(found, "after"), *losses(found, "before"), *losses(found, "dead zone")}) == 5
    assert losses(found, "dead zone")[0] > 2 * losses(found, "clean")[0]


def test_every_fault_and_noise_is_proven_in_its_order(found):
    clauses = {}
    for arm in found["arms"]:
        rows = [row for row in arm["proof"] if row["where"] == "scored: own"]
        assert all(row["verdict"] == "agrees" for row in rows)
        clauses[arm["name"]] = [row["fault"].partition(":")[0] for row in rows]
    zone, noise = "dead_zone", "absolute_gaussian"
    assert clauses == {
        "clean": [],
        "dead zone": [zone],
        "after": [zone, noise],
        "before": [noise, zone],
        "guided": [zone, "relative_gaussian"],
    }


def test_a_guided_arm_has_the_sigma_of_the_located_layer(found):
    """Low gain, or a dead zone, and high kurtosis: 1.5 times 1.5."""
    arm = next(a for a in found["arms"] if a["name"] == "guided")
    assert arm["aqn"] == "constant:0.02,form=output,layers=3,multipliers=3:2.25"
    assert [row["asked"] for row in arm["proof"] if row["fault"].startswith("relative")] == [pytest.approx(0.045)]


def test_the_survival_of_both_orders_is_in_the_report(found):
    zones = {arm["name"]: row for arm in found["arms"] for row in arm["proof"] if row["fault"].startswith("dead_zone")}
    alone, after, before = (zones[name]["survival"] for name in ("dead zone", "after", "before"))
    assert alone == pytest.approx(after, rel=0.05) and before != after, "after it the noise changes only what is generated"
    for text in (markdown(Findings.model_validate(found)), page(Findings.model_validate(found))):
        assert text.count(" survive)") == 4
        assert "nats" in text and "loss" in text


def test_a_pruned_arm_is_the_same_with_and_without_a_fault_in_its_layer(tmp_path):
    arms = {"as it comes": {"train": False}, "pruned": {"train": False, "skip_layers": [3]}}
    primary = {"a": "pruned", "b": "as it comes", "condition": "faulty", "endpoint": "loss"}
    conditions = {"faulty": ZONE, "other": "dead_zone:0.6,scope=token@layer.5"}
    study = untrained(
        arms=arms, seeds=1, evaluate={"n": 12, "loss": True, "conditions": conditions}, compare={"primary": primary}
    )
    check(study)
    for cell in cells_of(study):
        do(cell, study.study, tmp_path / "runs", "test")
    found = findings(study, tmp_path)
    assert not any("were not the same" in note for note in found["notes"]), "the weights are"
    assert losses(found, "pruned", "clean") == losses(found, "pruned", "faulty") != losses(found, "as it comes", "faulty")
    assert losses(found, "pruned", "other") != losses(found, "pruned", "clean")
    pruned = next(arm for arm in found["arms"] if arm["name"] == "pruned")
    assert pruned["settings"] == ["layer 3 not run"]
    assert [row["where"] for row in pruned["proof"]] == ["scored: other"]

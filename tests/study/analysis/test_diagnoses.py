"""A diagnosis as the report shows it, and the noise that was made of it."""

import pytest

from shaketable.aqn.guidance import Guidance
from shaketable.study.analysis import diagnoses
from shaketable.study.analysis.runs import Run
from shaketable.study.cells import Cell
from tests.study.small_studies import told

STATISTICS = {"gain": 0.9, "kurtosis": 2.0, "instability": 0.0}


def diagnosis(*words):
    return told(diagnoses.diagnosis(*words))


def probe(layer, status):
    return {"layer": layer, "results": {"replay": {"status": status}, "twin": {"status": "skipped"}}, "statistics": STATISTICS}


FOUND = {
    "schema": 1, "kind": "diagnosis", "model": "nano", "device": "cpu", "date": "2026-01-01", "num_layers": 2, "verdict": "FAULT", "layer": 1, "sentence": "FAULT: …",
    "fault_class": "dead_zone", "probes": [probe(0, "pass"), probe(1, "fail"), {**probe(None, "pass"), "statistics": None}],
}  # fmt: skip
GUIDE = {"guide": "fault", "sigma": 0.04, "schedule": "epoch_aware"}
RULES = {row.layer: row for row in Guidance.of(FOUND, target="all", base_sigma=0.04, schedule="epoch_aware").layers}


def located(found=FOUND):
    head = {"config": {"plan": "gain:0.1@layer.1", "model": "nano"}}
    return Run("diagnosis-1", "locate", None, None, "done", head, [{"event": "diagnosis", "diagnosis": found}])


def guided(needs="diagnosis-1", guide=GUIDE):
    return Cell("train", "targeted", 0, {}, 1, guide, needs)


def trained(cell, aqn, status="done"):
    return Run(cell.name, "train", "targeted", 0, status, {"config": {"aqn": aqn}}, [])


def test_layers_have_the_status_of_every_probe_and_their_statistics():
    shown = diagnosis(located(), [], [])
    assert shown == {
        "plan": "gain:0.1@layer.1",
        "model": "nano",
        "verdict": "FAULT",
        "sentence": "FAULT: …",
        "layer": 1,
        "layers": [
            {"layer": 0, "results": {"replay": "pass", "twin": "skipped"}, "statistics": STATISTICS},
            {"layer": 1, "results": {"replay": "fail", "twin": "skipped"}, "statistics": STATISTICS},
        ],
        "sigmas": [],
        "folder": "runs/diagnosis-1",
    }
    bare = FOUND | {"probes": [probe(0, "pass") | {"statistics": None}]}
    assert diagnosis(located(bare), [], [])["layers"][0]["statistics"] == {}


@pytest.mark.parametrize("cells", [[guided("another")], [guided(guide=None)]])
def test_a_diagnosis_that_guides_nobody_has_no_sigma(cells):
    assert diagnosis(located(), cells, [])["sigmas"] == []


def test_sigma_is_that_of_the_rules_for_all_layers_and_says_why():
    shown = diagnosis(located(), [guided("another"), guided()], [])["sigmas"]
    assert shown == [{"layer": n, "sigma": RULES[n].sigma, "label": RULES[n].label, "why": list(RULES[n].why)} for n in (0, 1)]
    assert RULES[1].sigma > RULES[0].sigma == 0.04, "the layer that was found has more"


def test_a_run_that_had_another_sigma_shows_its_own():
    cell, other = guided(), guided("another")
    runs = [
        trained(other, "constant:0.04,layers=0,multipliers=0:9"),
        trained(cell, "constant:0.04,layers=0-1,multipliers=0:2+1:3"),
    ]
    first, second = diagnosis(located(), [cell], runs)["sigmas"]
    assert (first["sigma"], second["sigma"]) == (pytest.approx(0.08), pytest.approx(0.12)) and first["label"] == ""
    assert first["why"] == [f"the rules of that time; those of today give {RULES[0].sigma:.4g}"]
    unfinished = [trained(cell, "constant:0.04,layers=0,multipliers=0:2", status="partial")]
    assert diagnosis(located(), [cell], unfinished)["sigmas"][0]["sigma"] == RULES[0].sigma

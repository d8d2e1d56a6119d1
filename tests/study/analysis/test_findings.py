"""What a study's findings say beyond its numbers: when the comparison was named, and whether runs can be compared at all."""

import shutil

import pytest
import torch

from shaketable.records.record import FILE, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.run_cell import do
from shaketable.study.store import define
from tests.study.small_studies import data, findings, study

ARMS = {"as it comes": {"train": False}, "noise + AQN": {**data()["arms"]["noise + AQN"]}}
COMPARE = {"primary": {"a": "noise + AQN", "b": "as it comes", "condition": "noise"}}


def small(**replaced):
    evaluate = data()["evaluate"] | {"mechanism": True, "n": 8}
    return study(**{"arms": ARMS, "compare": COMPARE, "evaluate": evaluate} | replaced)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("store")
    define(small(), folder)
    for cell in cells_of(small()):
        do(cell, "small", folder / "small" / "runs", "test")
    return folder


@pytest.fixture(scope="module")
def found(store):
    return findings(small(), store / "small")


def test_arms_are_scored_under_the_same_noise_and_seeds_under_another(store):
    """Law 3: paired by seed means the very same errors, in every arm, trained or not, and at every step."""
    drawn = {}
    for cell in cells_of(small()):
        for event in RunRecord.open(store / "small" / "runs" / cell.name).events("evaluation"):
            drawn.setdefault(cell.seed, set()).add(tuple(c["plan_seed"] for c in event["conditions"]))
    assert [len(seeds) for seeds in drawn.values()] == [1, 1]
    assert drawn[0] != drawn[1]


def test_sigma_cost_and_samples_are_those_of_the_runs(found):
    plain, noisy = found["arms"]
    assert plain["curves"] == [] and plain["cost"]["seconds_per_step"] is None
    [line] = [curve["points"] for curve in noisy["curves"] if curve["name"] == "σ of AQN"]
    assert len(line) == 4 and max(p["high"] for p in line) == pytest.approx(0.05)
    assert 0 < noisy["cost"]["aqn_share"] < 1 and noisy["cost"]["injection_share"] > 0
    sample = plain["samples"][0]
    assert sample["question"] and sample["answer"] and sample["condition"] == "clean"


def copied(store, folder):
    shutil.copytree(store / "small", folder / "small")
    return folder / "small"


def test_a_study_that_was_never_run_or_whose_definition_was_changed_is_told(store, tmp_path):
    folder = copied(store, tmp_path)
    path = folder / "definition" / FILE
    path.write_text(path.read_text().replace("noise + AQN", "noise + aqn", 1))
    found = findings(small(), folder)
    assert not found["study"]["named_before"] and "was changed at line 1" in found["notes"][0]
    shutil.rmtree(folder / "definition")
    assert "nothing says that the comparison was named before the results" in findings(small(), folder)["notes"][0]

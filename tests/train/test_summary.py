"""What a run came to, read from its record alone."""

import json

import pytest

from shaketable.evaluate.statistics import holm
from shaketable.records.record import RunRecord
from shaketable.train.summary import outcome


def condition(name, right, n=40):
    answers = [{"id": str(i), "text": "", "correct": i < right, "formatted": True} for i in range(n)]
    return {"name": name, "accuracy": right / n, "n": n, "answers": answers, "ledger": {"forward": 1}}


@pytest.fixture
def record(tmp_path):
    record = RunRecord.create(tmp_path / "run", "train", {"steps": 2, "lr": None}, {"python": "3"})
    record.append("resolved", config={"steps": 2, "lr": 1e-4})
    record.append("evaluation", step=0, conditions=[condition("clean", 20), condition("plan", 10)])
    record.append("warning", step=0, text="careful")
    record.append("step", step=1, reward=0.1)
    record.append("step", step=2, reward=0.2)
    record.resumed(1)
    record.append("step", step=2, reward=0.3)
    record.append("evaluation", step=2, conditions=[condition("clean", 36), condition("plan", 12)])
    return record


def finished(record):
    record.append("finished", step=2, ledgers={"plan": {"forward": 7}})
    return outcome(record)


def test_everything_is_read_from_the_record(record):
    found = finished(RunRecord.open(record.folder, "train"))
    assert [(s["step"], s["reward"]) for s in found["steps"]] == [(1, 0.1), (2, 0.3)], "what was done again counts once"
    assert [e["step"] for e in found["evaluations"]] == [0, 2]
    assert (found["id"], found["kind"], found["schema"]) == (record.head["id"], "training", 1)
    assert found["config"]["lr"] == 1e-4 and found["environment"] == {"python": "3"}
    assert (found["warnings"], found["resumed"]) == (["careful"], 1)
    assert found["ledgers"] == {"plan": {"forward": 7}}
    assert found["model"] == str(record.folder / "model")
    json.dumps(found)


def test_clean_and_faulty_scores_are_apart_and_without_their_answers(record):
    found = finished(record)
    assert {name: c["accuracy"] for name, c in found["final"].items()} == {"clean": 0.9, "plan": 0.3}
    assert not any({"answers", "ledger"} & set(c) for c in found["final"].values())
    assert not any({"answers", "ledger"} & set(c) for e in found["evaluations"] for c in e["conditions"])


def test_training_and_fault_are_compared_on_the_same_problems_as_one_family(record):
    found = {c["of"]: c for c in finished(record)["comparisons"]}
    assert list(found) == ["training, clean", "training, plan", "plan against clean, after training"]
    differences = [c["difference"] for c in found.values()]
    assert differences == pytest.approx([16 / 40, 2 / 40, -24 / 40])
    raw, adjusted = [c["p"] for c in found.values()], [c["adjusted"] for c in found.values()]
    assert adjusted == pytest.approx(holm(raw))
    assert adjusted[2] < 0.001 < adjusted[1]

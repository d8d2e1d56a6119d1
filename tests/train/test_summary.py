"""What a run came to, read from its record alone."""

import pytest

from shaketable.evaluate.statistics import holm
from shaketable.records.record import RunRecord
from shaketable.train.summary import outcome


def condition(name, right, n=40):
    answers = [{"id": str(i), "text": "", "correct": i < right, "formatted": True} for i in range(n)]
    return {"name": name, "accuracy": right / n, "n": n, "answers": answers, "ledger": {"forward": 1}}


def test_training_and_fault_are_compared_on_the_same_problems_as_one_family(tmp_path):
    record = RunRecord.create(tmp_path / "run", "train", {"steps": 2, "lr": None}, {"python": "3"})
    record.append("resolved", config={"steps": 2, "lr": 1e-4})
    record.append("evaluation", step=0, conditions=[condition("clean", 20), condition("plan", 10)])
    record.append("evaluation", step=2, conditions=[condition("clean", 36), condition("plan", 12)])
    record.append("finished", step=2, ledgers={"plan": {"forward": 7}})
    found = {c["of"]: c for c in outcome(record)["comparisons"]}
    assert list(found) == ["training, clean", "training, plan", "plan against clean, after training"]
    differences = [c["difference"] for c in found.values()]
    assert differences == pytest.approx([16 / 40, 2 / 40, -24 / 40])
    raw, adjusted = [c["p"] for c in found.values()], [c["adjusted"] for c in found.values()]
    assert adjusted == pytest.approx(holm(raw))
    assert adjusted[2] < 0.001 < adjusted[1]

from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import GSM8K

FOLDER = Path(__file__).parent / "data" / "gsm8k"


@pytest.fixture
def task():
    return GSM8K(path=FOLDER)


def problems(task, split):
    with pytest.warns(UserWarning, match=r"GSM8K (train|test) has (7473|1319): scores do not compare"):
        return list(task.problems(split))


def test_questions_and_gold_answers(task):
    assert [p.answer for p in problems(task, "test")] == ["18", "70000", "2,125"]
    assert [p.answer for p in problems(task, "train")] == ["72", "-7"]
    first = task.problems("test")[0]
    assert first.id == "test-0" and first.question.startswith("Janet")


def test_right_and_formatted_are_two_things(task):
    problem = problems(task, "test")[0]
    for completion, expected in {"#### 18": (1, 1), "#### 180": (0, 1), "It is 18.": (1, 0), "####": (0, 0)}.items():
        score = task.score(problem, completion)
        assert (score.correct, score.formatted) == expected, completion


def test_a_solution_without_a_marker_is_named_by_its_line(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "a?", "answer": "#### 1"}\n\n{"question": "b?", "answer": "2"}\n')
    with pytest.raises(ShaketableError, match=r"test\.jsonl: line 3: the answer does not end in ####"):
        GSM8K(path=tmp_path).problems("test")


def test_without_a_hub_both_ways_are_named(monkeypatch):
    import datasets

    def unreachable(*names, split):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ShaketableError, match=r"\(no route\).*pip install datasets.*gsm8k,path=DIR"):
        GSM8K().problems("test")

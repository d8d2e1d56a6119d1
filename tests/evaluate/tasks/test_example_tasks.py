"""The tasks of examples/tasks.py: a little code and a dialogue, loaded as a user loads them."""

import pytest

from shaketable.evaluate.tasks import Score, load_task, reward_of, sample, score_of
from tests import ROOT

FILE = ROOT / "examples" / "tasks.py"


@pytest.fixture(params=["Expressions", "Dialogue,turns=5"])
def task(request):
    return load_task(f"{FILE}:{request.param}")


def test_sides_have_problems_and_share_none(task):
    train, test = ({p.id: p for p in task.problems(side)} for side in ("train", "test"))
    assert len(train) > len(test) >= 10 and not train.keys() & test.keys()
    assert len(train) == len(task.problems("train")), "an id is there once"


def test_the_right_answer_is_right_and_another_is_not(task):
    for problem in sample(task, "test", 10, 0):
        assert score_of(task, problem, problem.answer) == Score(True, True)
        assert not score_of(task, problem, "I do not know").correct
        assert reward_of(task, problem, problem.answer) == 1.0
        assert task.prompt(problem, chat=False) and problem.answer not in task.prompt(problem, chat=True).rpartition("User:")[2]


@pytest.mark.parametrize(
    ("text", "correct", "formatted"),
    [
        ("2*x+3", True, True),
        ("lambda x: 3+x+x", True, True),
        ("the answer is 2*x+3", False, False),
        ("__import__('os').getcwd()", False, False),
        ("(" * 500, False, False),
    ],
)
def test_an_expression_is_read_and_never_run(text, correct, formatted):
    task = load_task(f"{FILE}:Expressions")
    problem = next(p for side in ("train", "test") for p in task.problems(side) if p.answer == "2*x+3")
    assert score_of(task, problem, text) == Score(correct, formatted)

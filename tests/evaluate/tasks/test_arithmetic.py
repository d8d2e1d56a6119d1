import pytest
from hypothesis import given
from hypothesis import strategies as st

from shaketable.evaluate.tasks import Arithmetic, Problem, sample
from shaketable.evaluate.tasks.arithmetic import LEVELS

SMALL = (2, 5)
SIZES = {1: 100 * 100, 2: 2 * 90 * 90, 3: 2 * 900 * 900, 4: 100**3, 5: 90 * 9 + 90 * 90}


def sides(level):
    task = Arithmetic(level=level)
    return {side: [p.id for p in task.problems(side)] for side in ("train", "test")}


@pytest.mark.parametrize("level", SMALL)
def test_a_fifth_of_a_level_is_test_and_the_rest_train(level):
    found = sides(level)
    train, test = set(found["train"]), set(found["test"])
    assert not train & test
    assert len(train) + len(test) == len(train | test) == SIZES[level]
    assert len(test) / SIZES[level] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("level", SMALL)
def test_a_commuted_problem_is_on_the_same_side(level):
    side_of = {text: side for side, texts in sides(level).items() for text in texts}
    swapped = [(t, op.join(reversed(t.split(op)))) for t in side_of for op in "+-*" if op in t]
    both = [(a, b) for a, b in swapped if b in side_of and a != b]
    assert len(both) > 7000
    assert all(side_of[a] == side_of[b] for a, b in both)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right_and_terms_are_of_the_level(level):
    digits = {1: {1, 2}, 2: {2}, 3: {3}, 4: {1, 2}, 5: {1, 2}}[level]
    operators = {1: "+", 2: "+-", 3: "+-", 4: "+", 5: "*"}[level]
    met = set()
    for split in ("train", "test"):
        for problem in sample(Arithmetic(level=level), split, 400, seed=3):
            assert problem.question == f"{problem.id}="
            assert eval(problem.id) == int(problem.answer)
            op = next(o for o in operators if o in problem.id)
            terms = problem.id.split(op)
            assert len(terms) == (3 if level == 4 else 2)
            assert {len(t) for t in terms} <= digits
            met.add(op)
    assert met == set(operators)


@pytest.mark.parametrize(
    ("completion", "answer", "correct", "formatted"),
    [
        ("122", "122", True, True),
        ("122.5", "122", False, True),
        ("122\n45+3=48", "122", True, True),
        ("The answer is 122.", "122", True, False),
        ("−48", "-48", True, True),
        ("1,220", "1220", True, True),
        ("0122", "122", True, True),
        ("", "122", False, False),
        ("9" * 5000, "122", False, True),
    ],
)
def test_scores(completion, answer, correct, formatted):
    score = Arithmetic().score(Problem("x", "x=", answer), completion)
    assert (score.correct, score.formatted) == (correct, formatted)


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_origin_26_a_completion_is_right_when_the_whole_integer_is(answer, said):
    score = Arithmetic().score(Problem("x", "x=", str(answer)), f" {said}")
    assert score.correct == (said == answer)
    assert score.formatted

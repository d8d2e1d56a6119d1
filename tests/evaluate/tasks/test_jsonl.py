import json

import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import JsonlTask, Problem


def written(folder, rows):
    path = folder / "riddles.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(n, **more):
    return [{"question": f"{i}?", "answer": f"answer {i}", **more} for i in range(n)]


def test_without_a_split_a_fifth_is_test_whatever_the_order(tmp_path):
    rows = asked(1000)
    before = JsonlTask(path=written(tmp_path, rows))
    test = {p.question for p in before.problems("test")}
    assert len(test) == pytest.approx(200, abs=40)
    assert not test & {p.question for p in before.problems("train")}
    after = JsonlTask(path=written(tmp_path, [{"question": "new", "answer": "x"}, *reversed(rows)]))
    assert {p.question for p in after.problems("test")} - {"new"} == test


def test_blank_lines_marks_and_line_separators_do_no_harm(tmp_path):
    path = tmp_path / "riddles.jsonl"
    path.write_bytes('\ufeff\r\n{"question": "a\u2028b", "answer": "é", "split": "test"}\r\n\r\n'.encode())
    assert JsonlTask(path=path).problems("test") == [Problem("line-2", "a\u2028b", "é")]


@pytest.mark.parametrize(
    ("gold", "completion", "correct", "formatted"),
    [
        ("A Piano", " a piano\n", True, True),
        ("a piano", "a piano.", False, True),
        ("32", "8 · 4 = 32", True, False),
        ("1,080", "#### 1080", True, False),
    ],
)
def test_scores(tmp_path, gold, completion, correct, formatted):
    task = JsonlTask(path=written(tmp_path, [{"question": "q", "answer": gold, "split": "test"}]))
    score = task.score(task.problems("test")[0], completion)
    assert (score.correct, score.formatted) == (correct, formatted)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"answer": "x"}], r"riddles\.jsonl: line 1 has no question"),
        ([*asked(2), {"question": "q", "answer": ["x"]}], "line 3 has no answer: a text or a number"),
        (asked(3, id="a"), "line 2: split must be train or test, and no id there twice"),
        (b'{"question": "a", "answer": "b"}\nnot json\n', "line 2 is not JSON"),
    ],
)
def test_bad_files_are_refused_when_the_task_is_made(tmp_path, rows, message):
    path = tmp_path / "riddles.jsonl"
    path.write_bytes(rows if isinstance(rows, bytes) else written(tmp_path, rows).read_bytes())
    with pytest.raises(ShaketableError, match=message):
        JsonlTask(path=path)

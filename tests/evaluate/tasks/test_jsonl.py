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


def test_a_given_split_is_kept(tmp_path):
    task = JsonlTask(
        path=written(tmp_path, [*asked(3, split="train"), {"question": "q", "answer": 8, "split": "test", "id": 7}])
    )
    assert [p.id for p in task.problems("train")] == ["line-1", "line-2", "line-3"]
    assert task.problems("test") == [Problem("7", "q", "8")]


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
        ("Straße", "STRASSE", True, True),
        ("a piano", "A thought:\na piano", False, False),
        ("a piano", "", False, False),
        ("32", "32", True, True),
        ("32", "32.0", True, True),
        ("32", "8 · 4 = 32", True, False),
        ("32", "3", False, True),
        ("32", "320", False, True),
        ("1,080", "#### 1080", True, False),
        ("1/2", "0.5", True, True),
        ("12 monkeys", "12", False, True),
    ],
)
def test_scores(tmp_path, gold, completion, correct, formatted):
    task = JsonlTask(path=written(tmp_path, [{"question": "q", "answer": gold, "split": "test"}]))
    score = task.score(task.problems("test")[0], completion)
    assert (score.correct, score.formatted) == (correct, formatted)


def test_missing_answers_are_counted_and_the_first_is_named(tmp_path):
    rows = asked(40)
    del rows[6]["answer"]
    rows[8]["answer"], rows[9]["answer"] = None, "  "
    with pytest.raises(ShaketableError, match=r"riddles\.jsonl: 3 of 40 problems have no answer \(first: line 7\)$"):
        JsonlTask(path=written(tmp_path, rows))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"answer": "x"}], r"1 of 1 problems have no question \(first: line 1\)"),
        ([*asked(2), {"question": "q", "answer": ["x"]}], "line 3: answer must be a text or a number, not list"),
        ([*asked(1), {"question": "q", "answer": True}], "line 2: answer must be a text or a number, not bool"),
        (asked(3, id="a"), "the id 'a' is on lines 1 and 2; ids must differ"),
        ([*asked(1), {"question": "q", "answer": "x", "id": "line-1"}], "the id 'line-1' is on lines 1 and 2"),
        (asked(2, split="test") + asked(1), r"1 of 3 problems have no split \(first: line 3\)"),
        (asked(1, split="tests"), r"line 1: unknown split 'tests'; did you mean 'test'\?"),
        ([*asked(1), ["q", "a"]], "line 2 holds list, not an object"),
        ([], r"riddles\.jsonl is empty"),
    ],
)
def test_bad_files_are_refused_when_the_task_is_made(tmp_path, rows, message):
    with pytest.raises(ShaketableError, match=message):
        JsonlTask(path=written(tmp_path, rows))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"question": "a", "answer": "b"}\nnot json\n', "line 2 is not JSON"),
        (b'{"question": "a", "answer": "b"}\n\xff\xfe', "line 2 is not UTF-8"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"\n \n", "is empty"),
    ],
)
def test_what_is_not_json_lines_is_named_by_its_line(tmp_path, data, message):
    (tmp_path / "bad.jsonl").write_bytes(data)
    with pytest.raises(ShaketableError, match=message):
        JsonlTask(path=tmp_path / "bad.jsonl")

import json
import shutil
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import Arithmetic, JsonlTask, load_task

DATA = Path(__file__).parent / "data"
OWN = """
from __future__ import annotations
from typing import Literal
from shaketable.evaluate.tasks import Problem, Score, Task, Arithmetic

class Riddles(Task):
    name = "riddles"
    mood: Mood = "kind"

    def problems(self, split):
        return [Problem("1", "?", "!")]

    def score(self, problem, completion):
        return Score(True, True)

Mood = Literal["kind", "grim"]
Riddles.model_rebuild()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "gsm8k", tmp_path / "gsm8k")
    (tmp_path / "riddles.jsonl").write_text(json.dumps({"question": "q", "answer": "a", "split": "test"}))
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_tasks_module.py").write_text(OWN)


def test_built_in_tasks_and_a_file():
    assert load_task(" arithmetic , level = 2 ") == Arithmetic(level=2)
    task = load_task("riddles.jsonl,max_new_tokens=32")
    assert task == JsonlTask(path="riddles.jsonl", max_new_tokens=32)
    assert task.describe() == {"name": "jsonl", "max_new_tokens": 32, "path": "riddles.jsonl"}


def test_a_class_of_ones_own_from_a_file_and_from_a_module(monkeypatch, tmp_path):
    task = load_task("own.py:Riddles,mood=grim")
    assert task.describe() == {"name": "riddles", "max_new_tokens": 64, "mood": "grim"}
    assert load_task(f"{tmp_path}/own.py:Riddles").problems("test")[0].answer == "!"
    monkeypatch.syspath_prepend(tmp_path)
    assert load_task("own_tasks_module:Riddles").describe()["mood"] == "kind"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arithmetics", r"unknown task 'arithmetics'; did you mean 'arithmetic'\? valid: arithmetic, gsm8k, "),
        ("arithmetic,level=6", r"task arithmetic: level: Input should be less than or equal to 5 \(got '6'\)"),
        ("gsm8k,path=nowhere", r"nowhere holds no GSM8K; expected a folder with train\.jsonl and test\.jsonl"),
        ("own.py:Ridles", r"own\.py:Ridles is not a finished subclass of Task; did you mean 'Riddles'\?"),
        ("no_such_module_here:Riddles", r"no_such_module_here cannot be imported .* a file is written my_tasks\.py:Class"),
    ],
)
def test_errors_are_one_line_and_name_the_nearest(text, message):
    with pytest.raises(ShaketableError, match=message) as raised:
        load_task(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("code", ["def broken(:", "raise RuntimeError('a\\nb')"])
def test_a_file_that_does_not_import_is_one_line_with_its_cause(tmp_path, code):
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ShaketableError, match=r"broken\.py cannot be imported: \w+Error") as raised:
        load_task("broken.py:Riddles")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None

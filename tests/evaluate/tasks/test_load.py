import json
import shutil
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import GSM8K, Arithmetic, JsonlTask, TextTask, load_task

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

class Half(Task):
    name = "half"

    def problems(self, split):
        return []

class Other:
    pass

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


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("arithmetic", Arithmetic(level=3)),
        (" arithmetic , level = 2 ", Arithmetic(level=2)),
        ("arithmetic,level=5,max_new_tokens=3", Arithmetic(level=5, max_new_tokens=3)),
        ("text", TextTask()),
    ],
)
def test_built_in_tasks(text, task):
    assert load_task(text) == task


def test_tasks_from_files():
    assert load_task("gsm8k,path=gsm8k") == GSM8K(path="gsm8k")
    task = load_task("riddles.jsonl,max_new_tokens=32")
    assert task == load_task("jsonl,path=riddles.jsonl,max_new_tokens=32") == JsonlTask(path="riddles.jsonl", max_new_tokens=32)
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
        ("nowhere.py:Riddles", r"cannot read nowhere\.py: no such file"),
        ("own.py:Ridles", r"own\.py:Ridles is not a finished subclass of Task; did you mean 'Riddles'\?"),
        ("no_such_module_here:Riddles", r"no_such_module_here cannot be imported .* a file is written my_tasks\.py:Class"),
    ],
)
def test_errors_are_one_line_and_name_the_nearest(text, message):
    with pytest.raises(ShaketableError, match=message) as raised:
        load_task(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("code", ["def broken(:", "import no_such_module_here", "raise RuntimeError('a\\nb')"])
def test_a_file_that_does_not_import_is_one_line_with_its_cause(tmp_path, code):
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ShaketableError, match=r"broken\.py cannot be imported: \w+Error") as raised:
        load_task("broken.py:Riddles")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None

"""Every block of docs/tasks.md is executed, loaded or read."""

import re
import shutil
from pathlib import Path

from shaketable.evaluate.tasks import Arithmetic, load_task
from shaketable.evaluate.tasks.load import BUILT_IN
from tests import ROOT
from tests.evaluate.tasks.test_verl_parquet import rows, written

PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_is_of_a_kind_that_is_tested():
    assert re.findall(r"^```(\w+)$", PAGE, re.MULTILINE) == ["text", "python", "json", "python"]


def test_python_blocks_run(capsys):
    for block in blocks("python"):
        exec(block, {"__name__": "snippet"})
    printed = capsys.readouterr().out
    assert "Score(correct=True, formatted=False)\n{'name': 'arithmetic'" in printed


def test_every_task_of_the_page_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(__file__).parent / "data" / "gsm8k", tmp_path / "gsm8k")
    written(tmp_path / "test.parquet", rows("test"))
    (tmp_path / "essays.txt").write_text("One.\n")
    (tmp_path / "problems.jsonl").write_text(blocks("json")[0])
    (tmp_path / "my_tasks.py").write_text(blocks("python")[1])
    lines = blocks("text")[0].splitlines()
    tasks = [load_task(line) for line in lines]
    assert [t.name for t in tasks] == ["arithmetic", "gsm8k", "gsm8k", "text", "text", "jsonl", "riddles"]
    assert tasks[5].problems("test")[0].id == "spiders"
    riddle = tasks[6].problems("test")[0]
    assert tasks[6].prompt(riddle, chat=True) == "Please: What gets wetter as it dries?"
    assert tasks[6].score(riddle, "A towel.").correct


def test_every_task_field_and_default_is_on_the_page():
    for task in BUILT_IN.values():
        assert f"`{task.name}`" in PAGE or task.name == "jsonl"
        for field in task.model_fields:
            assert f"`{field}=" in PAGE, field
    assert f"{Arithmetic().max_new_tokens} for arithmetic" in PAGE
    assert f"{BUILT_IN['gsm8k'].model_fields['max_new_tokens'].default} for GSM8K" in PAGE

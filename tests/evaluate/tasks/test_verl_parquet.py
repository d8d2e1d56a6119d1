"""GSM8K in the parquet files that verl trains and validates on."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import GSM8K, code_in, load_task, sample

LINES = Path(__file__).parent / "data" / "gsm8k"
ASK = 'Let\'s think step by step and output the final answer after "####".'

pytestmark = pytest.mark.filterwarnings("ignore:.*scores do not compare")


def row(question, solution, split, index):
    """One row as verl's `gsm8k.py` makes it."""
    gold = solution.rpartition("####")[2].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {ASK}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index, "answer": solution, "question": question},
    }


def rows(split):
    lines = [json.loads(line) for line in (LINES / f"{split}.jsonl").read_text().splitlines()]
    return [row(line["question"], line["answer"], split, index) for index, line in enumerate(lines)]


def written(path, found):
    parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return path


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "test"):
        written(tmp_path / f"{split}.parquet", rows(split))
    return tmp_path


def test_a_folder_has_both_sides_with_the_gold_answers_of_the_lines(folder):
    task, lines = load_task(f"gsm8k,path={folder}"), GSM8K(path=LINES)
    for split in ("train", "test"):
        golds = [p.answer for p in task.problems(split)]
        assert golds == [p.answer.replace(",", "") for p in lines.problems(split)]
        assert [p.id for p in task.problems(split)] == [p.id for p in lines.problems(split)]
    assert len(sample(task, "test", 2, seed=0)) == 2


def test_the_prompt_is_the_files_own(folder):
    task = load_task(f"gsm8k,path={folder}")
    for split in ("train", "test"):
        problem, message = task.problems(split)[0], rows(split)[0]["prompt"][0]["content"]
        assert task.prompt(problem, chat=True) == message
        assert task.prompt(problem, chat=False) == f"{message}\nAnswer:"


def test_a_file_is_a_task_by_itself_and_no_code(folder):
    name = str(folder / "test.parquet")
    assert code_in(f"file:{name}") is None
    task = load_task(f"{name},max_new_tokens=50")
    assert (task.describe()["name"], task.max_new_tokens, len(task.problems("test"))) == ("gsm8k", 50, 3)
    with pytest.raises(ShaketableError, match=r"test\.parquet has no train problems; expected a folder"):
        task.problems("train")


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]},
        {"reward_model": {"ground_truth": "many"}},
    ],
)
def test_another_layout_is_refused_with_its_row(tmp_path, change):
    path = written(tmp_path / "test.parquet", [made | change for made in rows("test")])
    with pytest.raises(ShaketableError, match="row 0 is of another layout; verl's GSM8K has one prompt of the user"):
        load_task(str(path)).problems("test")

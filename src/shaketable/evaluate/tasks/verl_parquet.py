"""GSM8K as verl's own script writes it: train.parquet and test.parquet. pyarrow is imported when a file is read.

    data_source    "openai/gsm8k"
    prompt         [{"role": "user", "content": the question, and how to end the answer}]
    ability        "math"
    reward_model   {"style": "rule", "ground_truth": "18"}
    extra_info     {"split": "test", "index": 0, "question": …, "answer": …}

The prompt is asked as it stands in the file, so that a score compares with what verl validates. The side is the file's name, or
`extra_info.split` where it has another name.

Rejected: other data sources. Each has a reward function of its own in verl, and a score by another rule would carry its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.numeric import is_number

SOURCE = "openai/gsm8k"
COLUMNS = ("data_source", "prompt", "reward_model")


def rows_of(path: Path, split: str) -> list[tuple[str, str]]:
    """Prompt and gold number of the problems of one side, in the order of the file.

    Raises:
        ShaketableError: The file cannot be read, is not of this layout, or has no problem of that side.
    """
    table = _table(path)
    if missing := [column for column in COLUMNS if column not in table.column_names]:
        raise ShaketableError(f"{path} has no column {missing[0]!r}; verl's layout has {', '.join(COLUMNS)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    chosen = [(number, row) for number, row in enumerate(rows) if _side(path, number, row) == split]
    if not chosen:
        raise ShaketableError(f"{path} has no {split} problems; give a folder with train.parquet and test.parquet")
    return [(_prompt(path, number, row), _gold(path, number, row)) for number, row in chosen]


def _table(path: Path) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ShaketableError(f"{path}: reading parquet needs pyarrow ({error}): pip install pyarrow") from None
    try:
        return parquet.read_table(path)
    except (OSError, ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise ShaketableError(f"cannot read {path}: {why}") from None


def _side(path: Path, number: int, row: dict[str, Any]) -> str:
    if path.stem in ("train", "test"):
        return path.stem
    side = (row.get("extra_info") or {}).get("split")
    if side not in ("train", "test"):
        what = f"{path}: row {number} has extra_info.split {side!r}"
        raise ShaketableError(f"{what}; expected train or test, or a file that is called train.parquet or test.parquet")
    return str(side)


def _prompt(path: Path, number: int, row: dict[str, Any]) -> str:
    if row["data_source"] != SOURCE:
        raise ShaketableError(f"{path}: row {number} has data_source {row['data_source']!r}; {SOURCE} is read here")
    messages = row["prompt"]
    if not isinstance(messages, list) or [m.get("role") for m in messages if isinstance(m, dict)] != ["user"]:
        raise ShaketableError(f"{path}: the prompt of row {number} is not one message of the user; verl's GSM8K has one")
    return str(messages[0]["content"])


def _gold(path: Path, number: int, row: dict[str, Any]) -> str:
    gold = (row["reward_model"] or {}).get("ground_truth")
    if not is_number(str(gold)):
        raise ShaketableError(f"{path}: reward_model.ground_truth of row {number} is {gold!r}, not a number")
    return str(gold).strip()

"""GSM8K: 7473 + 1319 grade-school word problems (Cobbe et al. 2021, MIT), from a folder or from the hub.

The gold answer is what follows `####` in the worked solution. A completion is right when its number is; `formatted` says
whether it ended as the prompt asked, and is scored apart. Numbers are compared whole, by math-verify.

A folder may also hold verl's own files, train.parquet and test.parquet (`verl_parquet.py`); then the prompts are theirs.

Rejected: a subset that ships with the package. A score on it would be read as a GSM8K score; for the same reason a local
file that does not hold the published number of problems gets a warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.lines import read_rows, require
from shaketable.evaluate.tasks.numeric import MARKER, NUMBER, final_answer, is_number, same_number
from shaketable.evaluate.tasks.task import SPLITS, Problem, Score, Split, Task, checked_split
from shaketable.evaluate.tasks.verl_parquet import rows_of

HUB = ("openai/gsm8k", "main")
SIZES: Mapping[Split, int] = {"train": 7473, "test": 1319}
ASK = f"Solve this step by step. End with a line that holds only {MARKER} and the answer as a number, such as: {MARKER} 42"
FOLDER = "a folder with train.jsonl and test.jsonl, or verl's train.parquet and test.parquet: gsm8k,path=DIR"
PARQUET = ".parquet"
_FORM = re.compile(rf"{MARKER}[ \t]*{NUMBER.pattern}", re.ASCII)


class GSM8K(Task):
    """Grade-school mathematics in words."""

    name: ClassVar[str] = "gsm8k"
    max_new_tokens: int = Field(default=400, ge=1)
    path: Path | None = None
    """A folder with train.jsonl and test.jsonl, or verl's .parquet, or one of the files; the hub when not given."""

    @model_validator(mode="after")
    def _path_has_a_split(self) -> GSM8K:
        if self.path is None:
            return self
        if not any(_file(self.path, s).is_file() for s in SPLITS):
            raise ShaketableError(f"{self.path} holds no GSM8K; expected {FOLDER}")
        for side in (s for s in SPLITS if all((self.path / f"{s}{end}").is_file() for end in (".jsonl", PARQUET))):
            raise ShaketableError(f"{self.path} holds both {side}.jsonl and {side}{PARQUET}; name one of the files")
        return self

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one side, in the order of the set."""
        return self._train if checked_split(split) == "train" else self._test

    def prompt(self, problem: Problem, chat: bool) -> str:
        """The question, and the form that the answer should have; of a parquet file, its own prompt."""
        if self.path is not None and _file(self.path, "test" if problem.id.startswith("test") else "train").suffix == PARQUET:
            return problem.question if chat else f"{problem.question}\nAnswer:"
        return f"{problem.question}\n{ASK}" if chat else f"{ASK}\n\nQuestion: {problem.question}\nAnswer:"

    def score(self, problem: Problem, completion: str) -> Score:
        """The number after the last ####, else in the last \\boxed, else the last one."""
        return Score(same_number(problem.answer, final_answer(completion)), _FORM.search(completion) is not None)

    @cached_property
    def _train(self) -> list[Problem]:
        return _problems(self.path, "train")

    @cached_property
    def _test(self) -> list[Problem]:
        return _problems(self.path, "test")


def _problems(path: Path | None, split: Split) -> list[Problem]:
    rows = _from_hub(split) if path is None else _from_file(_file(path, split), split)
    return [Problem(f"{split}-{n}", question, gold) for n, (question, gold) in enumerate(rows)]


def _file(path: Path, split: Split) -> Path:
    """The file of a side: in the folder, or the path itself; a parquet file says of each problem which side it is on."""
    if path.is_file() and (path.name == f"{split}.jsonl" or path.suffix == PARQUET):
        return path
    return path / f"{split}{PARQUET if (path / f'{split}{PARQUET}').is_file() else '.jsonl'}"


def _from_file(file: Path, split: Split) -> list[tuple[str, str]]:
    if file.suffix == PARQUET:
        found = rows_of(file, split)
        _check_size(file, split, len(found))
        return found
    rows = read_rows(file)
    for key in ("question", "answer"):
        require(file, rows, key, "problems")
    _check_size(file, split, len(rows))
    return [(str(row["question"]).strip(), _gold(row["answer"], f"{file}: line {number}")) for number, row in rows]


def _check_size(file: Path, split: Split, count: int) -> None:
    if count != SIZES[split]:
        warnings.warn(
            f"{file} has {count} problems, GSM8K {split} has {SIZES[split]}: scores do not compare with published ones",
            stacklevel=3,
        )


def _from_hub(split: Split) -> list[tuple[str, str]]:
    rows = _download(split)
    if len(rows) != SIZES[split]:
        raise ShaketableError(f"{HUB[0]} has {len(rows)} {split} problems now, expected {SIZES[split]}; give {FOLDER}")
    return [(r["question"].strip(), _gold(r["answer"], f"{HUB[0]} {split}, problem {n}")) for n, r in enumerate(rows)]


def _download(split: Split) -> Sequence[Mapping[str, Any]]:
    try:
        from datasets import load_dataset

        return list(load_dataset(*HUB, split=split))
    except Exception as error:  # the library raises its own, the hub's and the network's
        why = str(error).partition("\n")[0] or type(error).__name__
        ways = f"either `pip install datasets` and a way to {HUB[0]}, or {FOLDER}"
        raise ShaketableError(f"cannot get GSM8K from the hub ({why}); it needs {ways}") from error


def _gold(solution: object, place: str) -> str:
    gold = str(solution).rpartition(MARKER)[2].strip()
    if MARKER not in str(solution) or not is_number(gold):
        raise ShaketableError(f"{place}: the answer does not end in {MARKER} and a number")
    return gold

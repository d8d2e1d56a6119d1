"""A user's own problems: a file with {"question": …, "answer": …} on each line.

With `"split": "train"` or `"test"` on every line the file says which side a problem is on; without, a hash of the question
does (BLAKE2, one in five is test): a question that occurs twice is on one side, and lines may be added or moved without moving
the others. The file is read and checked when the task is made, before anybody loads a model. Keys other than question,
answer, id and split are the user's own and left alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.lines import Rows, read_rows, refuse, require, text_at
from shaketable.evaluate.tasks.numeric import final_answer, is_number, same_number
from shaketable.evaluate.tasks.task import Problem, Score, Split, Task, checked_split

TEST_SHARE = 5  # one problem in five


class JsonlTask(Task):
    """Questions and answers from a file."""

    name: ClassVar[str] = "jsonl"
    path: Path
    """One JSON object on each line: question, answer, and if wanted id and split."""

    @model_validator(mode="after")
    def _is_read(self) -> JsonlTask:
        self._sides  # noqa: B018
        return self

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one side, in the order of the file."""
        found = self._sides[checked_split(split)]
        if not found:
            raise ShaketableError(f'{self.path} has no {split} problems; add some, or give every line a "split"')
        return found

    def score(self, problem: Problem, completion: str) -> Score:
        """A number equals the gold number; a text equals the gold text but for case and space around it."""
        said = completion.strip()
        if is_number(problem.answer):
            return Score(same_number(problem.answer, final_answer(said)), is_number(said))
        return Score(said.casefold() == problem.answer.casefold(), bool(said) and "\n" not in said)

    @cached_property
    def _sides(self) -> dict[Split, list[Problem]]:
        rows = read_rows(self.path)
        for key in ("question", "answer"):
            require(self.path, rows, key, "problems")
        problems, sides = _problems(self.path, rows), _splits(self.path, rows)
        return {side: [p for p, s in zip(problems, sides, strict=True) if s == side] for side in ("train", "test")}


def _problems(path: Path, rows: Rows) -> list[Problem]:
    problems = [Problem(_id(path, n, row), *(text_at(path, n, row, k) for k in ("question", "answer"))) for n, row in rows]
    twice = [name for name, count in Counter(p.id for p in problems).items() if count > 1]
    if twice:
        lines = [n for (n, _), p in zip(rows, problems, strict=True) if p.id == twice[0]]
        raise ShaketableError(f"{path}: the id {twice[0]!r} is on lines {lines[0]} and {lines[1]}; ids must differ")
    return problems


def _id(path: Path, number: int, row: dict[str, Any]) -> str:
    return text_at(path, number, row, "id") if "id" in row else f"line-{number}"


def _splits(path: Path, rows: Rows) -> list[Split]:
    if not any("split" in row for _, row in rows):
        return [side_of(str(row["question"])) for _, row in rows]
    refuse(path, (n for n, row in rows if "split" not in row), len(rows), "no split", "problems")
    return [_side(path, number, row) for number, row in rows]


def _side(path: Path, number: int, row: dict[str, Any]) -> Split:
    try:
        return checked_split(str(row["split"]))
    except ShaketableError as error:
        raise ShaketableError(f"{path}: line {number}: {error}") from None


def side_of(question: str) -> Split:
    """The side of a question that nobody put on one: one in five is test, by its text."""
    digest = hashlib.blake2b(question.strip().casefold().encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"

"""Texts to read: what a fault costs in loss, with nothing generated and nothing scored.

Every model has a loss on text, also one too small to solve a problem, and it moves smoothly where accuracy moves in steps.
The built-in sentences were written for this file, so that no model has learnt them by heart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import model_validator

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.lines import read_rows, read_text, require, text_at
from shaketable.evaluate.tasks.task import Problem, Score, Split, Task

BUILT_IN = Path(__file__).with_name("sentences.txt")


class TextTask(Task):
    """Texts whose loss is measured."""

    name: ClassVar[str] = "text"
    kind: ClassVar[Literal["generate", "text"]] = "text"
    path: Path | None = None
    """A .jsonl file with a "text" on each line, or a text file: paragraphs where blank lines part them, else one text a line.
    The built-in sentences when not given."""

    @model_validator(mode="after")
    def _generates_nothing(self) -> TextTask:
        if "max_new_tokens" in self.model_fields_set:
            raise ShaketableError("the text task generates nothing: drop max_new_tokens")
        if self.path is not None and not self.path.is_file():
            raise ShaketableError(f"cannot read {self.path}: no such file")
        return self

    def texts(self) -> list[str]:
        """The texts, in the order of the file."""
        path = self.path or BUILT_IN
        if path.suffix == ".jsonl":
            rows = read_rows(path)
            require(path, rows, "text", "lines")
            return [text_at(path, number, row, "text") for number, row in rows]
        return parts_of(path)

    def describe(self) -> dict[str, Any]:
        """Name and parameters, for run records."""
        return {"name": self.name, **self.model_dump(mode="json", exclude={"max_new_tokens"})}

    def problems(self, split: Split) -> Sequence[Problem]:
        """There are none: raises."""
        _no_problems()

    def score(self, problem: Problem, completion: str) -> Score:
        """There is none: raises."""
        _no_problems()


def _no_problems() -> NoReturn:
    raise ShaketableError("the text task has texts to read and no problems to solve; use e.g. arithmetic or gsm8k")


def parts_of(path: Path) -> list[str]:
    """The paragraphs of a text file, or its lines where it has no blank ones."""
    whole = read_text(path).strip()
    paragraphs = re.split(r"\n[ \t]*\n\s*", whole)
    parts = paragraphs if len(paragraphs) > 1 else whole.split("\n")
    if not whole:
        raise ShaketableError(f"{path} is empty; expected one text a line, or paragraphs")
    return [" ".join(part.split()) for part in parts]

"""Tasks whose problems are in files: GSM8K, a user's own JSONL, and texts to read. Errors name file and line.

**GSM8K** (Cobbe et al. 2021, MIT): a folder with verl's train.parquet and test.parquet, or with train.jsonl and test.jsonl,
or the hub. The gold answer follows `####` in the worked solution. verl's files are asked with their own prompts, so
that a score compares with its validation.

**JSONL**: {"question": …, "answer": …} on each line, and if wanted `id` and `split`; without `split`, a hash of the question
puts one in five on the test side, so lines may be added or moved without moving others.

**Texts**: the loss is measured and nothing is generated. The built-in sentences were written for this package.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field, model_validator

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.numeric import MARKER, NUMBER, final_answer, is_number, same_number
from shaketable.evaluate.tasks.task import SPLITS, TEST_SHARE, Problem, Score, Split, Task, sample


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark and with plain line ends."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ShaketableError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_rows(path: Path, *required: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; blank lines are passed over.

    Raises:
        ShaketableError: A line is no object, or has no text or number at a required key; or there is no line.
    """
    rows = []
    lines = read_text(path).split("\n")  # splitlines would cut at U+2028, which JSON allows inside a string
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ShaketableError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ShaketableError(f"{path}: line {number} is not an object such as {{…}}")
        for key in required:
            if not isinstance(row.get(key), str | int | float) or not str(row[key]).strip():
                raise ShaketableError(f"{path}: line {number} has no {key}: a text or a number")
        rows.append((number, row))
    if not rows:
        raise ShaketableError(f"{path} is empty; expected one JSON object on each line")
    return rows


def texts_of(path: Path, *keys: str) -> list[str]:
    """The texts of a file: one a line at one of `keys` (.jsonl), else paragraphs, or lines where no blank ones part them."""
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        key = next((k for k in keys if k in rows[0][1]), keys[0])
        return [str(row[key]).strip() for _, row in read_rows(path, key)]
    whole = read_text(path).strip()
    if not whole:
        raise ShaketableError(f"{path} is empty; expected one text a line, or paragraphs")
    paragraphs = re.split(r"\n[ \t]*\n\s*", whole)
    return [" ".join(part.split()) for part in (paragraphs if len(paragraphs) > 1 else whole.split("\n"))]


# ---- JSONL


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
        found = self._sides[split]
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
        sides: dict[Split, list[Problem]] = {"train": [], "test": []}
        seen = set()
        for number, row in read_rows(self.path, "question", "answer"):
            question, answer = str(row["question"]).strip(), str(row["answer"]).strip()
            name, side = str(row.get("id", f"line-{number}")), str(row.get("split", side_of(question)))
            if side not in SPLITS or name in seen:
                raise ShaketableError(f"{self.path}: line {number}: split must be train or test, and no id there twice")
            seen.add(name)
            sides["train" if side == "train" else "test"].append(Problem(name, question, answer))
        return sides


def side_of(question: str) -> Split:
    """The side of a question without a given one: one in five is test, by a hash of its text."""
    digest = hashlib.blake2b(question.strip().casefold().encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


# ---- GSM8K

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
    def _path_has_a_side(self) -> GSM8K:
        if self.path is not None and not self._files:
            raise ShaketableError(f"{self.path} holds no GSM8K; expected {FOLDER}")
        return self

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._train if split == "train" else self._test

    def prompt(self, problem: Problem, chat: bool) -> str:
        """The question, and the form that the answer should have; of parquet files, their own prompt."""
        if any(file.suffix == PARQUET for file in self._files.values()):
            return problem.question if chat else f"{problem.question}\nAnswer:"
        return f"{problem.question}\n{ASK}" if chat else f"{ASK}\n\nQuestion: {problem.question}\nAnswer:"

    def score(self, problem: Problem, completion: str) -> Score:
        """The number after the last ####, else in the last \\boxed, else the last one."""
        return Score(same_number(problem.answer, final_answer(completion)), _FORM.search(completion) is not None)

    @cached_property
    def _files(self) -> dict[Split, Path]:
        found: dict[Split, Path] = {}
        if self.path is not None:
            for split, ending in product(SPLITS, (PARQUET, ".jsonl")):
                file = self.path if self.path.name == f"{split}{ending}" else self.path / f"{split}{ending}"
                if file.is_file():
                    found.setdefault(split, file)
        return found

    @cached_property
    def _train(self) -> list[Problem]:
        return self._read("train")

    @cached_property
    def _test(self) -> list[Problem]:
        return self._read("test")

    def _read(self, split: Split) -> list[Problem]:
        """The problems of one side; warns when there are not as many as were published."""
        if self.path is None:
            place, rows = HUB[0], _from_hub(split)
        elif (file := self._files.get(split)) is not None:
            place, rows = str(file), _parquet_rows(file) if file.suffix == PARQUET else _jsonl_rows(file)
        else:
            raise ShaketableError(f"{self.path} has no {split} problems; expected {FOLDER}")
        if len(rows) != SIZES[split]:
            what = f"{place} has {len(rows)} problems, GSM8K {split} has {SIZES[split]}"
            warnings.warn(f"{what}: scores do not compare with published ones", stacklevel=2)
        return [Problem(f"{split}-{n}", question, gold) for n, (question, gold) in enumerate(rows)]


def _jsonl_rows(file: Path) -> list[tuple[str, str]]:
    rows = read_rows(file, "question", "answer")
    return [(str(row["question"]).strip(), _gold(row["answer"], f"{file}: line {number}")) for number, row in rows]


def _from_hub(split: Split) -> list[tuple[str, str]]:
    try:
        from datasets import load_dataset

        rows: list[Mapping[str, Any]] = list(load_dataset(*HUB, split=split))
    except Exception as error:  # the library raises its own, the hub's and the network's
        why = str(error).partition("\n")[0] or type(error).__name__
        ways = f"either `pip install datasets` and a way to {HUB[0]}, or {FOLDER}"
        raise ShaketableError(f"cannot get GSM8K from the hub ({why}); it needs {ways}") from error
    return [(r["question"].strip(), _gold(r["answer"], f"{HUB[0]} {split}, problem {n}")) for n, r in enumerate(rows)]


def _gold(solution: object, place: str) -> str:
    gold = str(solution).rpartition(MARKER)[2].strip()
    if MARKER not in str(solution) or not is_number(gold):
        raise ShaketableError(f"{place}: the answer does not end in {MARKER} and a number")
    return gold


def _parquet_rows(path: Path) -> list[tuple[str, str]]:
    """Prompt and gold number of each problem, in the order of the file."""
    try:
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
    except (ImportError, OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ShaketableError(f"cannot read {path}: {str(error).partition(chr(10))[0]}") from None
    found = []
    for number, row in enumerate(rows):
        try:
            ((role, text),) = ((message["role"], message["content"]) for message in row["prompt"])
            source, gold = row["data_source"], str(row["reward_model"]["ground_truth"]).strip()
        except (KeyError, TypeError, ValueError):
            role = source = text = gold = ""
        if (role, source) != ("user", HUB[0]) or not is_number(gold):
            layout = "verl's GSM8K has one prompt of the user and a number as ground_truth"
            raise ShaketableError(f"{path}: row {number} is of another layout; {layout}")
        found.append((str(text), gold))
    return found


# ---- texts

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
        return texts_of(self.path or BUILT_IN, "text")

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **self.model_dump(mode="json", exclude={"max_new_tokens"})}

    def problems(self, split: Split) -> Sequence[Problem]:
        _no_problems()

    def score(self, problem: Problem, completion: str) -> Score:
        """There is none: raises."""
        _no_problems()


def _no_problems() -> NoReturn:
    raise ShaketableError("the text task has texts to read and no problems to solve; use e.g. arithmetic or gsm8k")


# ---- drawing


DEFAULT_N = 200


def default_n(task: Task) -> int:
    """The default number of problems: 200, or all texts of a text task."""
    return len(task.texts()) if isinstance(task, TextTask) else DEFAULT_N


def draw(task: Task, n: int, seed: int) -> list[Problem]:
    """What is scored: a random sample of the test side, or of the texts."""
    if not isinstance(task, TextTask):
        return sample(task, "test", n, seed)
    texts = task.texts()
    if not 2 <= n <= len(texts):
        raise ShaketableError(f"cannot draw {n} texts: there are {len(texts)}, and an interval needs two at least")
    chosen = random.Random(f"{task.name}/test/{seed}").sample(range(len(texts)), n)
    return [Problem(f"text {i + 1}", texts[i], "") for i in chosen]

"""Tasks whose problems are in files: GSM8K, a user's own JSONL, and texts to read. Every error names file and line.

**GSM8K** (Cobbe et al. 2021, MIT): a folder with train.jsonl and test.jsonl, verl's train.parquet and test.parquet, or the
hub. The gold answer follows `####` in the worked solution. verl's files are asked with their own prompts, so
that a score compares with its validation. A file that does not hold the published number of problems gets a warning.

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
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field, model_validator

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks.numeric import MARKER, NUMBER, final_answer, is_number, same_number
from shaketable.evaluate.tasks.task import SPLITS, TEST_SHARE, Problem, Score, Split, Task, checked_split, sample

Rows = list[tuple[int, dict[str, Any]]]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark and with plain line ends."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ShaketableError(f"{path}: line {line} is not UTF-8") from None


def read_rows(path: Path) -> Rows:
    """The objects of a JSONL file with their line numbers; blank lines are passed over, an empty file is refused."""
    lines = read_text(path).split("\n")  # splitlines would cut at U+2028, which JSON allows inside a string
    rows = [(number, _object(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ShaketableError(f"{path} is empty; expected one JSON object on each line")
    return rows


def require(path: Path, rows: Rows, key: str, what: str) -> None:
    """Refuse rows without a value at `key`, with their count and the first line."""
    bad = [number for number, row in rows if not str("" if row.get(key) is None else row[key]).strip()]
    refuse(path, bad, len(rows), f"no {key}", what)


def refuse(path: Path, bad: Iterable[int], total: int, missing: str, what: str) -> None:
    """Refuse a file when lines are bad: how many, and which is the first."""
    if lines := list(bad):
        raise ShaketableError(f"{path}: {len(lines)} of {total} {what} have {missing} (first: line {lines[0]})")


def text_at(path: Path, number: int, row: dict[str, Any], key: str) -> str:
    """The value at a key as text; only texts and numbers have one."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ShaketableError(f"{path}: line {number}: {key} must be a text or a number, not {type(value).__name__}")
    return str(value).strip()


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShaketableError(f"{path}: line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ShaketableError(f"{path}: line {number} holds {type(row).__name__}, not an object such as {{…}}")
    return row


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
        named = any("split" in row for _, row in rows)
        if named:
            refuse(self.path, (n for n, row in rows if "split" not in row), len(rows), "no split", "problems")
        sides: dict[Split, list[Problem]] = {"train": [], "test": []}
        lines: dict[str, int] = {}
        for number, row in rows:
            name = text_at(self.path, number, row, "id") if "id" in row else f"line-{number}"
            if name in lines:
                where = f"is on lines {lines[name]} and {number}"
                raise ShaketableError(f"{self.path}: the id {name!r} {where}; ids must differ")
            lines[name] = number
            try:
                side = checked_split(str(row["split"])) if named else side_of(str(row["question"]))
            except ShaketableError as error:
                raise ShaketableError(f"{self.path}: line {number}: {error}") from None
            question, answer = (text_at(self.path, number, row, key) for key in ("question", "answer"))
            sides[side].append(Problem(name, question, answer))
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
        return _gsm8k(self.path, "train")

    @cached_property
    def _test(self) -> list[Problem]:
        return _gsm8k(self.path, "test")


def _gsm8k(path: Path | None, split: Split) -> list[Problem]:
    rows = _from_hub(split) if path is None else _from_file(_file(path, split), split)
    return [Problem(f"{split}-{n}", question, gold) for n, (question, gold) in enumerate(rows)]


def _file(path: Path, split: Split) -> Path:
    """The file of a side: in the folder, or the path itself; a parquet file says of each problem which side it is on."""
    if path.is_file() and (path.name == f"{split}.jsonl" or path.suffix == PARQUET):
        return path
    return path / f"{split}{PARQUET if (path / f'{split}{PARQUET}').is_file() else '.jsonl'}"


def _from_file(file: Path, split: Split) -> list[tuple[str, str]]:
    """Questions and gold numbers; warns when there are not as many as were published."""
    if file.suffix == PARQUET:
        found = _parquet_rows(file, split)
    else:
        rows = read_rows(file)
        for key in ("question", "answer"):
            require(file, rows, key, "problems")
        found = [(str(row["question"]).strip(), _gold(row["answer"], f"{file}: line {number}")) for number, row in rows]
    if len(found) != SIZES[split]:
        what = f"{file} has {len(found)} problems, GSM8K {split} has {SIZES[split]}"
        warnings.warn(f"{what}: scores do not compare with published ones", stacklevel=2)
    return found


def _from_hub(split: Split) -> list[tuple[str, str]]:
    try:
        from datasets import load_dataset

        rows: list[Mapping[str, Any]] = list(load_dataset(*HUB, split=split))
    except Exception as error:  # the library raises its own, the hub's and the network's
        why = str(error).partition("\n")[0] or type(error).__name__
        ways = f"either `pip install datasets` and a way to {HUB[0]}, or {FOLDER}"
        raise ShaketableError(f"cannot get GSM8K from the hub ({why}); it needs {ways}") from error
    if len(rows) != SIZES[split]:
        raise ShaketableError(f"{HUB[0]} has {len(rows)} {split} problems now, expected {SIZES[split]}; give {FOLDER}")
    return [(r["question"].strip(), _gold(r["answer"], f"{HUB[0]} {split}, problem {n}")) for n, r in enumerate(rows)]


def _gold(solution: object, place: str) -> str:
    gold = str(solution).rpartition(MARKER)[2].strip()
    if MARKER not in str(solution) or not is_number(gold):
        raise ShaketableError(f"{place}: the answer does not end in {MARKER} and a number")
    return gold


# ---- verl's parquet files

SOURCE = "openai/gsm8k"
COLUMNS = ("data_source", "prompt", "reward_model")


def _parquet_rows(path: Path, split: str) -> list[tuple[str, str]]:
    """Prompt and gold number of the problems of one side, in the order of the file.

    Raises:
        ShaketableError: The file cannot be read, is not of this layout, or has no problem of that side.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ShaketableError(f"{path}: reading parquet needs pyarrow ({error}): pip install pyarrow") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise ShaketableError(f"cannot read {path}: {why}") from None
    if missing := [column for column in COLUMNS if column not in table.column_names]:
        raise ShaketableError(f"{path} has no column {missing[0]!r}; verl's layout has {', '.join(COLUMNS)}")
    found = [_parquet_row(path, n, row) for n, row in enumerate(table.to_pylist()) if _side_of_row(path, n, row) == split]
    if not found:
        raise ShaketableError(f"{path} has no {split} problems; give a folder with train.parquet and test.parquet")
    return found


def _side_of_row(path: Path, number: int, row: dict[str, Any]) -> str:
    if path.stem in ("train", "test"):
        return path.stem
    side = (row.get("extra_info") or {}).get("split")
    if side not in ("train", "test"):
        what = f"{path}: row {number} has extra_info.split {side!r}"
        raise ShaketableError(f"{what}; expected train or test, or a file that is called train.parquet or test.parquet")
    return str(side)


def _parquet_row(path: Path, number: int, row: dict[str, Any]) -> tuple[str, str]:
    if row["data_source"] != SOURCE:
        raise ShaketableError(f"{path}: row {number} has data_source {row['data_source']!r}; {SOURCE} is read here")
    messages = row["prompt"]
    if not isinstance(messages, list) or [m.get("role") for m in messages if isinstance(m, dict)] != ["user"]:
        raise ShaketableError(f"{path}: the prompt of row {number} is not one message of the user; verl's GSM8K has one")
    gold = (row["reward_model"] or {}).get("ground_truth")
    if not is_number(str(gold)):
        raise ShaketableError(f"{path}: reward_model.ground_truth of row {number} is {gold!r}, not a number")
    return str(messages[0]["content"]), str(gold).strip()


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

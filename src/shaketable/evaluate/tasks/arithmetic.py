"""Sums, differences and products of small numbers: a task that needs no data, with a train and a test side.

A level is a list of blocks, an operator and a range for each term; its problems are numbered through, so a problem is an
index and only those asked for are made. The side of a problem is a hash of its operator and its *sorted* terms (the finaliser
of splitmix64, on numpy's 64-bit integers): where it modulo 5 is 0 the problem is a test problem. So 12+34 and 34+12, or 34−12
and 12−34, are on one side, and on the same side at every level: what was a training problem at level 1 is no test problem at
level 2, and 0+12+34 goes with 12+34.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shaketable.evaluate.tasks.numeric import NUMBER, is_number, plain
from shaketable.evaluate.tasks.task import TEST_SHARE, Problem, Score, Split, Task

SUM, DIFFERENCE, PRODUCT = "+", "-", "*"


@dataclass(frozen=True)
class Block:
    """One operator between terms, each from a range."""

    operator: str
    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return math.prod(len(r) for r in self.ranges)

    def terms(self, index: int) -> list[int]:
        """The terms of one problem; the last one runs fastest."""
        found = []
        for values in reversed(self.ranges):
            index, rest = divmod(index, len(values))
            found.append(values[rest])
        return found[::-1]


_UP_TO_TWO, _ONE, _TWO, _THREE = range(100), range(1, 10), range(10, 100), range(100, 1000)
LEVELS: dict[int, tuple[Block, ...]] = {
    1: (Block(SUM, (_UP_TO_TWO, _UP_TO_TWO)),),
    2: (Block(SUM, (_TWO, _TWO)), Block(DIFFERENCE, (_TWO, _TWO))),
    3: (Block(SUM, (_THREE, _THREE)), Block(DIFFERENCE, (_THREE, _THREE))),
    4: (Block(SUM, (_UP_TO_TWO, _UP_TO_TWO, _UP_TO_TWO)),),
    5: (Block(PRODUCT, (_TWO, _ONE)), Block(PRODUCT, (_TWO, _TWO))),
}


class Arithmetic(Task):
    """Calculations of one level, every problem of the level equally likely to be drawn."""

    name: ClassVar[str] = "arithmetic"
    max_new_tokens: int = Field(default=16, ge=1)
    level: int = Field(default=3, ge=1, le=len(LEVELS))
    """1: sums of one- and two-digit numbers. 2: two-digit sums and differences. 3: three-digit sums and differences.
    4: sums of three terms of up to two digits. 5: two-digit numbers times one- and two-digit ones."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """One side of the level, each problem made when it is asked for."""
        return _Side(self.level, _sides(self.level)[split])

    def prompt(self, problem: Problem, chat: bool) -> str:
        """`37+85=` to continue, or a question for a chat model."""
        return f"What is {problem.question.removesuffix('=')}? Answer with the number only." if chat else problem.question

    def score(self, problem: Problem, completion: str) -> Score:
        """The first number of the first line, after the last equals sign if it has one (`96 + 50 = 146`), all its digits;
        formatted when that line is nothing but the number."""
        line = completion.strip().partition("\n")[0]
        first = NUMBER.search(line.rpartition("=")[2])
        return Score(first is not None and plain(first[0]) == problem.answer, is_number(line))


class _Side(Sequence[Problem]):
    """Problems by their numbers within a level."""

    def __init__(self, level: int, indices: npt.NDArray[np.int32]) -> None:
        self.level, self.indices = level, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Problem:  # type: ignore[override]
        return _problem(self.level, int(self.indices[index]))


def _problem(level: int, index: int) -> Problem:
    for block in LEVELS[level]:
        if index < len(block):
            break
        index -= len(block)
    terms = block.terms(index)
    text = block.operator.join(map(str, terms))
    return Problem(text, f"{text}=", str(_value(block.operator, terms)))


def _value(operator: str, terms: Sequence[int]) -> int:
    if operator == PRODUCT:
        return math.prod(terms)
    return sum(terms) if operator == SUM else terms[0] - terms[1]


@cache
def _sides(level: int) -> dict[Split, npt.NDArray[np.int32]]:
    hashes = np.concatenate([_mixed(_keys(block)) for block in LEVELS[level]])
    is_test = hashes % np.uint64(TEST_SHARE) == 0
    train, test = (np.flatnonzero(side).astype(np.int32) for side in (~is_test, is_test))
    return {"train": train, "test": test}


def _keys(block: Block) -> npt.NDArray[np.uint64]:
    """A number for operator and sorted terms, for every problem of a block."""
    grids = np.meshgrid(*(np.arange(r.start, r.stop) for r in block.ranges), indexing="ij")
    terms = np.sort(np.stack([g.ravel() for g in grids]), axis=0)
    key = np.full(terms.shape[1], ord(block.operator), dtype=np.uint64)
    padding = np.zeros((3 - len(terms), terms.shape[1]), dtype=terms.dtype)
    for row in np.concatenate([padding, terms]):
        key = key * np.uint64(1000) + row.astype(np.uint64)
    return key


def _mixed(key: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the key moves every bit of the result."""
    mixed = key.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))

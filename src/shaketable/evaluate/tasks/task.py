"""What a task is, and how problems are drawn from it.

A task is a frozen pydantic model: its fields are its parameters, so they are checked when it is made, written by
`describe()` into run records, and readable from the command line (`load.py`). Problems, prompt and scoring belong together,
because a score means nothing without the prompt that asked for it. Whether an answer is right and whether it has the form
that was asked for are two numbers: noise that only breaks the form must not look like noise that breaks the arithmetic.

`sample` draws problems with `random.Random` seeded by a string, which Python hashes with SHA-512: the same seed, size and set
give the same problems on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from shaketable.errors import ShaketableError

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
TEST_SHARE = 5  # one problem in five


@dataclass(frozen=True)
class Problem:
    """One question with its answer. The id is unique within the task."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True)
class Score:
    """Whether the answer is right, and whether it has the form that was asked for."""

    correct: bool
    formatted: bool


class Task(BaseModel, ABC):
    """Problems, prompts and scoring. A task of your own is a subclass with `name`, `problems` and `score`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """Names the task in run records."""
    kind: ClassVar[Literal["generate", "text"]] = "generate"
    """`generate`: the model answers and is scored. `text`: the model reads texts, and its loss is what counts."""

    max_new_tokens: int = Field(default=64, ge=1)
    """The longest answer, in tokens."""

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one side. May make them when they are asked for."""

    @abstractmethod
    def score(self, problem: Problem, completion: str) -> Score:
        """Score what the model wrote after the prompt, special tokens removed."""

    def prompt(self, problem: Problem, chat: bool) -> str:
        """What the model is asked: the user's message for a chat model, else the raw text to continue."""
        return problem.question

    def reward(self, score: Score) -> float:
        """The reward in training: 1 for a right answer, else 0."""
        return 1.0 if score.correct else 0.0

    def describe(self) -> dict[str, Any]:
        """Name and parameters, for run records."""
        return {"name": self.name, **self.model_dump(mode="json")}


def sample(task: Task, split: Split, n: int, seed: int) -> list[Problem]:
    """n different problems, drawn at random: the same ones for the same arguments, on every machine.

    Args:
        task: Where they come from.
        split: `train` or `test`.
        n: How many; as many as the side has gives all of them, in random order.
        seed: Keys the draw.
    """
    every = task.problems(split)
    if not 1 <= n <= len(every):
        raise ShaketableError(f"cannot draw {n} {split} problems from {task.name}: it has {len(every)}")
    drawn = random.Random(f"{task.name}/{split}/{seed}").sample(range(len(every)), n)
    return [every[i] for i in drawn]


def train_problems(task: Task, n: int, key: Callable[[int], int]) -> list[Problem]:
    """n train problems in random order, and all of them again in another order when they run out; `key` seeds each pass."""
    have = len(task.problems("train"))
    passes = -(-n // have)
    return [p for i in range(passes) for p in sample(task, "train", min(n, have), key(i))][:n]


def score_of(task: Task, problem: Problem, completion: str) -> Score:
    """The task's score, if it is one: tasks may be a user's own."""
    found = task.score(problem, completion)
    if not isinstance(found, Score):
        raise ShaketableError(f"the task {task.name} returned {found!r} as the score of {problem.id}; expected a Score")
    return found


def reward_of(task: Task, problem: Problem, completion: str) -> float:
    """The task's reward, if it is a finite number."""
    found = task.reward(score_of(task, problem, completion))
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise ShaketableError(
            f"the task {task.name} returned {found!r} as the reward of {problem.id}; expected a finite number"
        )
    return float(found)


def digest(problems: Sequence[Problem]) -> str:
    """A hash of problems in their order: what makes scores on them comparable."""
    content = json.dumps([[p.id, p.question, p.answer] for p in problems])
    return hashlib.sha256(content.encode()).hexdigest()


def examples(problems: Sequence[Problem], count: int = 6) -> list[dict[str, str]]:
    """The first problems as a record holds them, so that a report can show what was asked."""
    return [{"id": p.id, "question": p.question, "answer": p.answer} for p in problems[:count]]

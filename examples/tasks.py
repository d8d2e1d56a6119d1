"""Two tasks of one's own: a little code, and a dialogue in which something said earlier is asked for again.

    shaketable sweep smollm2-135m --task examples/tasks.py:Expressions --plan mxfp4@module.linear -n 50
    shaketable train MODEL --task examples/tasks.py:Dialogue,turns=3

They show all that a task can say: problems of a train and a test side that nobody has to download, a prompt, a score in two
parts (right, and in the form that was asked for), fields that are options on the command line, and a reward of one's own.

Nothing that a model wrote is ever executed: an expression is parsed, and evaluated by a dozen lines that know numbers, the
argument and three operators. A task that does run what a model writes needs a sandbox, and is not a small example. Naming this
file runs the file itself; a study that names it wants `--allow-code`.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from pydantic import Field

from shaketable import Problem, Score, Task

OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
INPUTS = range(-3, 8)
"""Arguments that two expressions must agree on to be the same function."""


class Expressions(Task):
    """Write a Python expression for a function that is given by examples: `f(0) = 3, f(1) = 5, f(2) = 7` is `2*x+3`."""

    name: ClassVar[str] = "expressions"
    max_new_tokens: int = Field(default=24, ge=1)
    largest: int = Field(default=9, ge=1, le=99)
    """The largest coefficient."""

    def problems(self, split: str) -> Sequence[Problem]:
        """Lines a·x + b; the two sides share none, because a hash of the coefficients decides."""
        every = [(a, b) for a in range(1, self.largest + 1) for b in range(self.largest + 1)]
        wanted = [pair for pair in every if (random.Random(str(pair)).random() < 0.2) == (split == "test")]
        return [self._problem(a, b) for a, b in wanted]

    def prompt(self, problem: Problem, chat: bool) -> str:
        """The examples, and what is asked for."""
        asked = f"{problem.question}. Write f as a Python expression in x."
        return f"{asked} Answer with the expression only." if chat else f"{asked}\nf = lambda x: "

    def score(self, problem: Problem, completion: str) -> Score:
        """Right when it computes the same values; formatted when it is nothing but an expression."""
        line = completion.strip().partition("\n")[0].removeprefix("lambda x:").strip().strip("`")
        found, wanted = _values(line), _values(problem.answer)
        return Score(correct=found is not None and found == wanted, formatted=found is not None)

    def reward(self, score: Score) -> float:
        """A wrong expression is better than none: there is something to learn from."""
        return 1.0 if score.correct else 0.1 if score.formatted else 0.0

    def _problem(self, a: int, b: int) -> Problem:
        examples = ", ".join(f"f({x}) = {a * x + b}" for x in range(3))
        return Problem(f"{a}x+{b}", examples, f"{a}*x+{b}")


class Dialogue(Task):
    """Answer the last turn of a conversation; the answer was said in the first one, with small talk in between."""

    name: ClassVar[str] = "dialogue"
    turns: int = Field(default=2, ge=0, le=20)
    """Turns of small talk between what is said and what is asked."""

    FACTS: ClassVar = {
        "name": ("My name is {}.", "What is my name?", ("Ada", "Bruno", "Chen", "Dana", "Emil", "Farah", "Goran", "Hana")),
        "town": ("I live in {}.", "Where do I live?", ("Lagos", "Lima", "Oslo", "Pune", "Quito", "Riga", "Seoul", "Turin")),
        "pet": ("I have a {}.", "What animal do I have?", ("cat", "dog", "goat", "hen", "horse", "parrot", "rabbit", "snake")),
    }
    TALK: ClassVar = ("It is raining today.", "I had soup for lunch.", "The train was late again.", "I like long walks.")

    def problems(self, split: str) -> Sequence[Problem]:
        """Six of eight values of a fact are for training, two for the test."""
        found = []
        for kind, (said, asked, values) in self.FACTS.items():
            for value in values[6:] if split == "test" else values[:6]:
                found += [self._problem(kind, said.format(value), asked, value, first) for first in range(len(self.TALK))]
        return found

    def score(self, problem: Problem, completion: str) -> Score:
        """Right when the answer's first line has the word; formatted when it has one line."""
        lines = completion.strip().splitlines() or [""]
        words = {word.strip(".,!?\"'").lower() for word in lines[0].split()}
        return Score(correct=problem.answer.lower() in words, formatted=len(lines) == 1)

    def _problem(self, kind: str, said: str, asked: str, value: str, first: int) -> Problem:
        talk = [self.TALK[(first + i) % len(self.TALK)] for i in range(self.turns)]
        lines = [line for turn in (said, *talk) for line in (f"User: {turn}", "Assistant: I see.")]
        return Problem(f"{kind}/{value}/{first}", "\n".join([*lines, f"User: {asked}", "Assistant:"]), value)


def _values(text: str) -> list[int] | None:
    """What an expression gives for a few arguments; None for what is no expression of numbers, x, + - and *."""
    try:
        tree = ast.parse(text, mode="eval").body
        return [_value(tree, x) for x in INPUTS]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, x: int) -> int:
    if isinstance(node, ast.Name) and node.id == "x":
        return x
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**6:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, x)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, x), _value(node.right, x))
    raise ValueError("not one of ours")

"""Numbers in what a model wrote: which one is its answer, and whether it equals another.

A literal is a sign, digits with or without thousands separators, decimals, and a denominator: -1,080.50 or 36/2. A minus
after a digit or letter is a subtraction or a hyphen, not a sign. `final_answer` finds the part of a completion that holds the
answer, in this order: after the last `####`, the last \\boxed, the last literal. math-verify parses that part and compares.
Its timeouts are signals, which work in the main thread only. Instead nothing that could run long reaches it: no powers, no
factorials, no LaTeX but the commands in `PLAIN_LATEX`, at most `LONGEST` characters.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from types import ModuleType

from shaketable.errors import ShaketableError

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(rf"(?:(?<![\w)])[-−])?[$€£]?(?:{_WHOLE}(?:\.\d+)?|(?<!\d)\.\d+)(?:/{_WHOLE})?", re.ASCII)
MARKER = "####"
LONGEST = 200
PLAIN_LATEX = {"boxed", "frac", "dfrac", "tfrac", "text", "textbf", "mathrm", "mathbf", "cdot", "times", "left", "right"}
_BOXED = re.compile(r"\\boxed\s*\{(?:[^{}]|\{[^{}]*\})*\}")


def is_number(text: str) -> bool:
    """Whether the text is one literal and nothing else but space around it."""
    return NUMBER.fullmatch(text.strip()) is not None


def plain(literal: str) -> str:
    """A literal without separators, currency and leading zeros: the text of an integer if it is one."""
    bare = re.sub(r"[,$€£]", "", literal).replace("−", "-")
    digits = bare.lstrip("-").lstrip("0")
    digits = digits if digits[:1].isdigit() else f"0{digits}"
    return digits if digits == "0" or not bare.startswith("-") else f"-{digits}"


def final_answer(completion: str) -> str:
    """The part of a completion that holds its answer; empty when there is none."""
    if MARKER in completion:
        return _after_marker(completion.rpartition(MARKER)[2])
    if boxes := _BOXED.findall(completion):
        return str(boxes[-1])
    literals = NUMBER.findall(completion)
    return str(literals[-1]) if literals else ""


def same_number(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold literal, by math-verify."""
    answer = plain(answer) if is_number(answer) else answer
    if not _is_quick(answer):
        return False
    library = _math_verify()
    want, got = (library.parse(text, parsing_timeout=None) for text in (plain(gold.strip()), answer))
    return bool(library.verify(want, got, timeout_seconds=None))


def _after_marker(tail: str) -> str:
    """The first line after the marker, or the literal at its start unless a sum follows."""
    line = next((x.strip() for x in tail.splitlines() if x.strip()), "")
    line = re.sub(r"(?<!\w)\*\*(.+?)\*\*(?!\w)", r"\1", line)  # bold
    literal = NUMBER.match(line)
    if literal is None or re.match(r"\s*[-+*/=^×÷−]", line[literal.end() :]):
        return line
    return literal[0]


def _is_quick(text: str) -> bool:
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    return 0 < len(text) <= LONGEST and not re.search(r"\^|\*\*|!", text) and commands <= PLAIN_LATEX


@cache
def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ImportError as error:
        raise ShaketableError(f"scoring needs math-verify ({error}): pip install 'shaketable[measure]'") from None
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    found: ModuleType = math_verify
    return found

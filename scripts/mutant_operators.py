"""Bugs that nobody wrote: at each statement that a seed draws, one small change that the same seed chooses.

    python scripts/mutant_operators.py SEED [EACH] > scripts/mutants/NAME.yaml

A bug that a person writes is one that this person thinks of, and who writes bugs and tests thinks of the same things twice. So
there are these too: a comparison is turned or moved by one, `and` is `or`, a number is one more, an argument is left out, two
are swapped, branches are swapped, a call is not made. Where nothing of this can be done, the next statement of the file is
taken. Many are coarse, and easier to catch than what people write; some are no bugs (a number that only costs time, a default
that is always replaced): who plants them says which, and why.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from mutant_sample import EACH, PACKAGE, draw, statements

TURNED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
TURNED |= {"is": "is not", "is not": "is", "and": "or", "or": "and", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
WORDS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
}
WORDS |= {ast.Is: "is", ast.IsNot: "is not", ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
WORDS |= {ast.Div: "/", ast.FloorDiv: "//"}
LISTS = Path(__file__).resolve().parent / "mutants"
Change = tuple[int, int, str]
"""From where to where in the file, and what stands there instead."""


class File:
    """A file of the package as text and as a tree."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        found = (n for n in ast.walk(ast.parse(self.text)) if isinstance(n, ast.stmt))
        self.statements = {n.lineno: n for n in sorted(found, key=lambda n: n.col_offset, reverse=True)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node is, in characters."""
        lines = self.text.splitlines()

        def place(line: int, column: int) -> int:
            return self.starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.AST) -> str:
        """The text of a node."""
        a, b = self.span(node)
        return self.text[a:b]

    def changes(self, line: int) -> list[Change]:
        """All that can be done at the statement of a line."""
        statement = self.statements[line]
        found = [c for node in _expressions(statement) for c in self._of(node)]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            found.append((*self.span(statement), "pass"))
        if isinstance(statement, ast.AugAssign):
            start = self.span(statement.target)[1]
            end = self.span(statement.value)[0]
            found.append((start, end, " = "))
        return found

    def _of(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._turned(node.left, node.ops[0], node.comparators[0])
        elif isinstance(node, ast.BoolOp):
            yield from self._turned(node.values[0], node.op, node.values[1])
        elif isinstance(node, ast.BinOp):
            yield from self._turned(node.left, node.op, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield (*self.span(node), self.source(node.operand))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            turned = not node.value if isinstance(node.value, bool) else node.value + 1
            yield (*self.span(node), repr(turned))
        elif isinstance(node, ast.IfExp):
            yield (*self.span(node), f"{self.source(node.orelse)} if {self.source(node.test)} else {self.source(node.body)}")
        elif isinstance(node, ast.Call):
            yield from self._arguments(node)

    def _turned(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> Iterator[Change]:
        word = WORDS.get(type(operator))
        start, end = self.span(left)[1], self.span(right)[0]
        if word in TURNED and self.text[start:end].strip(" ()") == word:
            yield start, end, self.text[start:end].replace(word, TURNED[word])

    def _arguments(self, node: ast.Call) -> Iterator[Change]:
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            (a, b), (c, d) = self.span(node.args[0]), self.span(node.args[1])
            yield a, d, self.text[c:d] + self.text[b:c] + self.text[a:b]
        given = [*node.args, *node.keywords]
        if len(given) > 1 and self.text[self.span(given[-1])[1]] == ")":
            yield self.span(given[-2])[1], self.span(given[-1])[1], ""


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, not of those inside of it, and no types."""
    for name, value in ast.iter_fields(statement):
        for member in value if isinstance(value, list) else [value]:
            if name != "annotation" and isinstance(member, ast.expr | ast.withitem):
                yield from ast.walk(member)


def bug(path: Path, line: int, chance: random.Random, known: list[dict[str, str]]) -> dict[str, str]:
    """A bug at the statement of a line, or at the next one that can have one that is not known yet."""
    file, lines = File(path), statements(path)
    at = lines.index(line)
    for other in [*lines[at:], *lines[:at]]:
        options = [_row(file, c) for c in file.changes(other) if _is_python(file.text, c)]
        if fresh := [row for row in options if row not in known]:
            return chance.choice(fresh)
    raise SystemExit(f"{path} has no statement that could be wrong")


def _is_python(text: str, change: Change) -> bool:
    a, b, new = change
    try:
        ast.parse(text[:a] + new + text[b:])
    except SyntaxError:
        return False
    return text[a:b] != new


def _row(file: File, change: Change) -> dict[str, str]:
    """The whole lines around a change, and as many before them as make them unique."""
    a, b, new = change
    start, end = file.text.rfind("\n", 0, a) + 1, file.text.find("\n", b)
    while file.text.count(file.text[start:end]) > 1:
        start = file.text.rfind("\n", 0, start - 1) + 1
    old = file.text[start:end]
    return {"file": str(file.path.relative_to(PACKAGE)), "old": old, "new": file.text[start:a] + new + file.text[b:end]}


def sample(seed: int, each: int = EACH) -> list[dict[str, str]]:
    """A bug at every statement that the seed draws; none that a list has already."""
    chance = random.Random(seed)
    lists = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(LISTS.glob("*.yaml"))]
    known = [{word: row[word] for word in ("file", "old", "new")} for rows in lists for row in rows]
    rows: list[dict[str, str]] = []
    for file, line in draw(seed, each):
        rows.append(bug(file, line, chance, known + rows))
    return rows


if __name__ == "__main__":
    print(yaml.safe_dump(sample(*map(int, sys.argv[1:])), sort_keys=False, allow_unicode=True, width=130), end="")

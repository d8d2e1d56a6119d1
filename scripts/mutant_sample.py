"""A fresh sample of statements, at which bugs are written. Nobody chooses them.

    python scripts/mutant_sample.py SEED [EACH]

prints five (or EACH) statements of every part of the core, drawn with the seed. At each of them a person writes a plausible
bug, or at the nearest statement that can be wrong, before looking at the tests; or `scripts/mutant_operators.py` makes one by
rule. Left out are parts that only a GPU or an engine runs. (Lists up to `fourth_fresh` were drawn from twelve parts, four of
each.)

A row of such a list names no tests: every test that executes the line is asked (`scripts/line_tests.py`).
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "shaketable"
CORE = ("plan.py", "faults", "sites", "inject", "ledger", "records", "locate", "measure/stats", "study/analysis", "launch")
ELSEWHERE = (
    "faults/gpu", "inject/device", "inject/fast", "inject/compile", "measure/decoding/cuda_graph.py",
    "measure/sweep/vllm.py", "study/engines/ray.py", "sites/vllm",
)  # fmt: skip
EACH = 5
NO_LOGIC = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass, ast.Global, ast.Nonlocal)


def statements(path: Path) -> list[int]:
    """The lines at which statements begin that can be wrong."""
    found = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.stmt))
    return sorted({n.lineno for n in found if not isinstance(n, NO_LOGIC) and not _is_docstring(n)})


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def draw(seed: int, each: int = EACH) -> Iterator[tuple[Path, int]]:
    """Files and lines, as many of every part."""
    chance = random.Random(seed)
    for part in CORE:
        files = sorted((PACKAGE / part).rglob("*.py")) if (PACKAGE / part).is_dir() else [PACKAGE / part]
        here = [f for f in files if not str(f.relative_to(PACKAGE)).startswith(ELSEWHERE)]
        yield from chance.sample([(file, line) for file in here for line in statements(file)], each)


if __name__ == "__main__":
    for file, line in draw(*map(int, sys.argv[1:])):
        print(f"{file.relative_to(PACKAGE)}:{line}: {file.read_text(encoding='utf-8').splitlines()[line - 1].strip()}")

"""A fresh sample of bugs: at which lines, and which tests are asked. Nobody chooses either.

    python scripts/mutant_sample.py SEED

prints four statements of every part of the core, drawn with the seed. At each of them a person writes a plausible bug, or at
the nearest statement that can be wrong, before looking at the tests. Left out are parts that only a GPU or an engine runs.

A row of such a list names no tests. It gets whole files: those of the folder of tests that mirrors the module's, of the folders
above, of the rest of that part, and those elsewhere that import the module, with the laws; of each first the one with its name,
then those that speak most often of what it defines. They are run until one fails, or until the time is over, and the bug is not
caught. A bug that got past them gets a test, and the row names it.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "src" / "shaketable", ROOT / "tests"
CORE = ("plan.py", "faults", "sites", "inject", "ledger", "records", "locate", "measure", "harden", "study", "launch", "io")
ELSEWHERE = (
    "faults/gpu", "inject/device", "inject/fast", "inject/compile", "measure/decoding/cuda_graph.py",
    "measure/sweep/vllm.py", "study/engines/ray.py", "sites/vllm",
)  # fmt: skip
EACH = 4
NO_LOGIC = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass, ast.Global, ast.Nonlocal)


def statements(path: Path) -> list[int]:
    """The lines at which statements begin that can be wrong."""
    found = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.stmt))
    return sorted({n.lineno for n in found if not isinstance(n, NO_LOGIC) and not _is_docstring(n)})


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def draw(seed: int) -> Iterator[tuple[Path, int]]:
    """Files and lines."""
    chance = random.Random(seed)
    for part in CORE:
        files = sorted((PACKAGE / part).rglob("*.py")) if (PACKAGE / part).is_dir() else [PACKAGE / part]
        here = [f for f in files if not str(f.relative_to(PACKAGE)).startswith(ELSEWHERE)]
        yield from chance.sample([(file, line) for file in here for line in statements(file)], EACH)


def mirrored(file: str) -> tuple[str, ...]:
    """The files of tests for a file of the package, in the order in which they are asked."""
    module = "shaketable." + file.removesuffix(".py").replace("/", ".")
    above, _, name = module.rpartition(".")
    text = {test: test.read_text(encoding="utf-8") for test in TESTS.rglob("test_*.py")}
    importing = {t for t, words in text.items() if f"{module} import" in words or f"from {above} import {name}" in words}
    places = {t: _distance(t.relative_to(TESTS), Path(file), t in importing) for t in text}
    names = re.compile(rf"\b({'|'.join(_names(PACKAGE / file))})\b")
    about = {t: (t.name != f"test_{Path(file).name}", -len(names.findall(words))) for t, words in text.items()}
    asked = sorted((t for t in text if places[t] is not None), key=lambda t: (places[t], about[t], len(text[t]), t))
    return tuple(str(test.relative_to(TESTS)) for test in asked)


def _names(path: Path) -> list[str]:
    """What a module defines for others."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
    return found or [path.stem]


def _distance(test: Path, file: Path, imports: bool) -> int | None:
    """0 in the folder that mirrors the file's, 1 above it, 2 in the same part of the package, 3 elsewhere; None: not asked."""
    if str(test).startswith((*ELSEWHERE, "gpu", "frameworks", "project")):
        return None
    if (test.parent, test.name) == (file.parent, f"test_{file.name}"):
        return 0
    if len(test.parts) == 1 or len(file.parts) == 1 or test.parts[0] != file.parts[0]:
        return 3 if imports or str(test) == "test_laws.py" else None
    return 0 if test.parent == file.parent else 1 if test.parent in file.parents else 2


if __name__ == "__main__":
    for file, line in draw(int(sys.argv[1])):
        print(f"{file.relative_to(PACKAGE)}:{line}: {file.read_text(encoding='utf-8').splitlines()[line - 1].strip()}")

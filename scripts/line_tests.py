"""Which tests execute a line: recorded once, asked for every planted bug.

    python scripts/line_tests.py tests/faults tests/test_plan.py …

runs the quick tests of every path named, and writes build/line_tests/*.json, one file for each path: how long each test took,
and which lines of the package it executed, also in the processes that it started. `Recorded` reads them all.

A context per test, as pytest-cov makes them, is not enough here: a command that a test starts is a process with one context of
its own (coverage reads it from PYTEST_CURRENT_TEST), and what a wide fixture does is seen in the first test alone. So a line
that is executed while a test is set up belongs to all tests of that file, and one that is executed on import to every test
that executes anything of its module or of a module that imports it.

Rejected: a rule that finds tests by the names of files (it was used before, and stopped after a minute of files nobody had
chosen); mutmut, which does record such a map, and then makes thousands of mutants by its own rules and in its own copy.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, KEPT = ROOT / "src" / "shaketable", ROOT / "build" / "line_tests"
QUICK = 1.0
"""Seconds; what takes longer is asked when everything quick has passed."""
SETTINGS = """[run]
source = {package}
data_file = {data}
parallel = true
patch = fork, _exit
context = {context}
"""


class Recorder:
    """A plugin of pytest that tells coverage which test runs."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds = coverage, defaultdict(float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(f"{nodeid} (setup)")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "setup":
            self.coverage.switch_context(f"{report.nodeid} (call)")
        if report.outcome == "failed":
            print(f"fails without any bug planted, and is left out: {report.nodeid}", flush=True)
            self.seconds[report.nodeid] = float("inf")

    def pytest_runtest_logfinish(self) -> None:
        self.coverage.switch_context("")


def record(path: str) -> None:
    """Run the quick tests of one path."""
    import pytest
    from coverage import Coverage

    KEPT.mkdir(parents=True, exist_ok=True)
    name = path.strip("/").replace("/", ".")
    data, here, commands = (KEPT / f"{name}.{end}" for end in ("coverage", "here.ini", "commands.ini"))
    for context in ("", "${PYTEST_CURRENT_TEST}"):
        words = SETTINGS.format(package=PACKAGE, data=data, context=context)
        (commands if context else here).write_text(words, encoding="utf-8")
    coverage = Coverage(config_file=str(here))
    coverage.start()
    os.environ["COVERAGE_PROCESS_START"] = str(commands)
    recorder = Recorder(coverage)
    pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", "-m", "not slow and not gpu", path], plugins=[recorder]
    )
    coverage.stop()
    coverage.save()
    coverage.combine()
    body = {"seconds": recorder.seconds, "lines": _lines(coverage.get_data()), "sources": _sources()}
    (KEPT / f"{name}.json").write_text(json.dumps(body), encoding="utf-8")
    for file in (here, commands, *KEPT.glob(f"{data.name}*")):
        file.unlink()


def _lines(data: Any) -> dict[str, dict[str, list[str]]]:
    """File → test (with what it did then) → lines as text, short: `3-7,9`."""
    found: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        tests: dict[str, list[int]] = defaultdict(list)
        for line, contexts in sorted(data.contexts_by_lineno(file).items()):
            for context in contexts:
                tests[context].append(line)
        found[str(Path(file).relative_to(PACKAGE))] = tests
    return {file: {test: _short(lines) for test, lines in tests.items()} for file, tests in found.items()}


def _short(lines: list[int]) -> str:
    runs: list[list[int]] = []
    for line in lines:
        if runs and runs[-1][1] == line - 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ",".join(f"{a}-{b}" for a, b in runs)


def _sources() -> dict[str, str]:
    """What each file of the package was."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(f.relative_to(PACKAGE)): hashlib.blake2b(f.read_bytes(), digest_size=8).hexdigest() for f in files}


class Recorded:
    """What was recorded of all paths."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, str]] = defaultdict(dict)
        now = _sources()
        for path in sorted(KEPT.glob("*.json")):
            body = json.loads(path.read_text(encoding="utf-8"))
            self.seconds |= body["seconds"]
            for file, tests in body["lines"].items():
                if now.get(file) == body["sources"].get(file):
                    self.lines[file] |= tests
                elif file in now and (moved := _moved(file, body["sources"].get(file))):
                    self.lines[file] |= {t: _short(sorted(set().union(*map(moved.get, _long(x))))) for t, x in tests.items()}

    def tests_of(self, file: str, first: int, last: int) -> list[str]:
        """The tests that execute any of these lines of a file of the package, in the order in which they are asked."""
        if file not in self.lines:
            raise SystemExit(f"no test was recorded with {file} as it is: run scripts/line_tests.py, and name its tests")
        asked = _statements(PACKAGE / file, first, last)
        found = set() if asked is None else self._executing(file, asked)
        return self._ordered(found or self._reading(file))

    def _reading(self, file: str) -> set[str]:
        """Tests that execute anything of a module or of one that imports it, and those in files that name it."""
        module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        naming = {test.partition("::")[0] for test in self.seconds}
        naming = {name for name in naming if (ROOT / name).exists() and module in (ROOT / name).read_text(encoding="utf-8")}
        found = {t for t, s in self.seconds.items() if t.partition("::")[0] in naming and s < float("inf")}
        return found.union(*(self._executing(f, None) for f in (file, *_importing(file))))

    def _executing(self, file: str, asked: set[int] | None) -> set[str]:
        found = {c for c, text in self.lines[file].items() if c and (asked is None or asked & _long(text))}
        tests = {context.rpartition(" (")[0] for context in found}
        wide = {context.partition("::")[0] for context in found if context.endswith("(setup)")}
        tests |= {test for test in self.seconds if test.partition("::")[0] in wide}
        return {test for test in tests if self.seconds.get(test, float("inf")) < float("inf")}

    def _ordered(self, tests: set[str]) -> list[str]:
        """Quick tests first, then slower ones, each time file by file, soonest done first: a file's fixture is made once."""
        known = [t for t in self.seconds if t in tests]
        whole: dict[tuple[bool, str], float] = defaultdict(float)
        place = {t: (self.seconds[t] > QUICK, t.partition("::")[0]) for t in known}
        for test in known:
            whole[place[test]] += self.seconds[test]
        return sorted(known, key=lambda t: (place[t][0], whole[place[t]], place[t][1]))


@cache
def _moved(file: str, was: str) -> dict[int, set[int]]:
    """Where the lines of a file are by now that was recorded as it once was; nothing where no commit has it so."""
    path = PACKAGE / file
    git = ["git", "-C", str(ROOT)]
    commits = subprocess.run([*git, "log", "-50", "--format=%H", "--", str(path)], capture_output=True, text=True).stdout
    for commit in commits.split():
        then = subprocess.run([*git, "show", f"{commit}:{path.relative_to(ROOT)}"], capture_output=True).stdout
        if hashlib.blake2b(then, digest_size=8).hexdigest() == was:
            old, new = then.decode().splitlines(), path.read_text(encoding="utf-8").splitlines()
            return _matched(old, new)
    return {}


def _matched(old: list[str], new: list[str]) -> dict[int, set[int]]:
    """A line that was replaced is at all lines that replace it, and what was put after a line is at that line."""
    found: dict[int, set[int]] = {line: set() for line in range(1, len(old) + 1)}
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in range(a + 1, b + 1) if kind != "insert" else (max(a, 1),):
            found[line] |= {c + line - a} if kind == "equal" else set(range(c + 1, d + 1))
    return found


def _long(text: str) -> set[int]:
    runs = (run.split("-") for run in text.split(",") if run)
    return {line for a, b in runs for line in range(int(a), int(b) + 1)}


def _statements(path: Path, first: int, last: int) -> set[int] | None:
    """All lines of the statements that begin or end there; None where they are executed on import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not any(f.body[0].lineno <= last and first <= (f.end_lineno or 0) for f in inside):
        return None
    simple = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in simple]
    found = {line for a, b in spans if a <= last and first <= b for line in range(a, b + 1)}
    return found | set(range(first, last + 1))


@cache
def _importing(file: str) -> tuple[str, ...]:
    module = "shaketable." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    above, _, name = module.rpartition(".")
    whole, above = re.escape(module), re.escape(above)
    said = re.compile(rf"from {whole} import|import {whole}\b|from {above} import [^\n]*\b{name}\b")
    found = (f for f in sorted(PACKAGE.rglob("*.py")) if said.search(f.read_text(encoding="utf-8")))
    return tuple(str(f.relative_to(PACKAGE)) for f in found)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        record(path)

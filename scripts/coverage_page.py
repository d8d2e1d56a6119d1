"""Write docs/coverage.md from the report of a test run (`make coverage`).

    python -m pytest TESTS --cov --cov-report=json:build/coverage.json
    python scripts/coverage_page.py [TESTS ...]

The names of tests are those that were run, if not all were: they stand on the page, because the numbers are of them alone.
Standard library only.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT, PAGE = ROOT / "build" / "coverage.json", ROOT / "docs" / "coverage.md"

TEXT = """# Coverage

Statements of `src/shaketable` that a run of {which} executes, commands and workers that the tests
start included. Made by `make coverage` on {date}, on a machine without a GPU: Triton's kernels run in its interpreter, which is
not counted, and what runs inside of vLLM and verl is tested in their own environments and not counted either.

| folder | statements | executed |
|---|---|---|
{rows}

What is executed is not what is proven: the [laws](../CONTRIBUTING.md#the-laws) are.
"""


def page(report: dict[str, object], tests: list[str]) -> str:
    """Lines that tests run, per folder of the package."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in report["files"].items():
        inside = name.partition("src/shaketable/")[2]
        for folder in (inside.split("/")[0] + "/" if "/" in inside else "the package's own files", "all"):
            counts[folder][0] += file["summary"]["covered_lines"]
            counts[folder][1] += file["summary"]["num_statements"]
    rows = [f"| {folder} | {lines:,} | {hit / lines:.0%} |" for folder, (hit, lines) in sorted(counts.items()) if lines]
    which = "all tests" if not tests else "**only these tests**: " + ", ".join(f"`{t}`" for t in tests)
    return TEXT.format(which=which, date=report["meta"]["timestamp"][:10], rows="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(REPORT.read_text(encoding="utf-8")), sys.argv[1:]), encoding="utf-8")

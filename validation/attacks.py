"""The suites of attacks: tests with `@pytest.mark.attack("suite")`, run and counted.

Who writes an attack marks its tests (or a whole file: `pytestmark = pytest.mark.attack("tampered records")`), and it is a
row of docs/validation.md by itself. The suites that there are to be: faults planted below the plan language, tampered
records, hostile inputs, kills, full disks, two processes on one study, a read-only folder, a jumping clock, thousands of
short processes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Suites:
    """A pytest plugin that counts outcomes by suite."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        self.failed: defaultdict[str, list[str]] = defaultdict(list)
        self._suites: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (mark := item.get_closest_marker("attack")) is not None:
                self._suites[item.nodeid] = str(mark.args[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = self._suites.get(report.nodeid)
        if suite is None:
            return
        self.seconds[suite] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[suite][report.outcome] += 1
            if report.outcome == "failed":
                self.failed[suite].append(report.nodeid)


def attack() -> list[dict[str, Any]]:
    """Run every suite: one row each."""
    found, start = Suites(), time.monotonic()
    code = pytest.main(["-q", "-m", "attack", "--rootdir", str(ROOT), str(ROOT / "tests")], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the attacks could not be run: pytest ended with {code!r} after {time.monotonic() - start:.0f} s")
    return [
        {"name": suite, **{k: counts[k] for k in ("passed", "failed", "skipped")}, "seconds": round(found.seconds[suite], 1),
         "fails": found.failed[suite]}
        for suite, counts in sorted(found.outcomes.items())
    ]  # fmt: skip

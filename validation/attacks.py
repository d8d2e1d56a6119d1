"""The suites of attacks: tests with `@pytest.mark.attack("suite")`, run and counted.

Who writes an attack marks its tests (or a whole file: `pytestmark = pytest.mark.attack("tampered records")`), and it is a
row of docs/validation.md by itself, with what `ABOUT` says of its suite. Everything runs as it does in CI, except for the
number of short processes.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT_PROCESSES = 2000
ABOUT = {
    "faults below the plan language": "locate: a dispatch mode, replaced methods, hooks, buffers, single bits of weights, "
    "faults that come and go, that follow the data or the token; in four architectures",
    "locate": "healthy models used in ways nobody prepared, and selections, views, attributes, buffers, batches and caches "
    "that are wrong",
    "mismatch": "healthy pairs of trainer and sampler, and files, sampling, engines and experts that are not what they say",
    "coverage of locate": "locate: any row of any operator, the head's too, and what it says it did not see",
    "foreign code in a model": "locate: code that is not the model's must be named",
    "layers that share states": "locate: healthy models whose layers write into what others are given",
    "models of one's own": "locate, compare, inject: models in plain PyTorch, and in code that ships with a checkpoint; "
    "healthy, and with faults planted below torch's functions",
    "tampered records": "records, seals, signatures, checkpoints: any byte changed, lines moved, a new chain, an old schema",
    "hostile inputs": "plans, YAML files, study files, the store's index: bombs, long lines, random bytes, random words",
    "kills": "training, studies, records: kill -9 at chosen moments, and at every use of the disk in turn",
    "full disks": "training, studies, records, ledgers: no room at every use of the disk in turn",
    "read-only folders": "what only reads works, what writes is one line",
    "two processes on one study": "locks, records, index and studies with two or more processes at once",
    "a jumping clock": "numbers, listings, locks, and what was decided before a run, under clocks that jump or stand",
    "thousands of short processes under `run`": f"`shaketable run`: {SHORT_PROCESSES} processes, one in 50 imports torch "
    "and calls a model; forks of one that does",
}
"""What a suite attacks."""


class Suites:
    """A pytest plugin that counts outcomes by suite."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        self.failed: defaultdict[str, list[str]] = defaultdict(list)
        self._suites: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (mark := item.get_closest_marker("attack")) is not None and self.name in mark.args[0]:
                self._suites[item.nodeid] = str(mark.args[0])
        items[:] = [item for item in items if item.nodeid in self._suites]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = self._suites.get(report.nodeid)
        if suite is None:
            return
        self.seconds[suite] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[suite][report.outcome] += 1
            if report.outcome == "failed":
                self.failed[suite].append(report.nodeid)


def attack(name: str = "") -> list[dict[str, Any]]:
    """Run every suite whose name has this text: one row each."""
    os.environ["SHAKETABLE_SHORT_PROCESSES"] = str(SHORT_PROCESSES)
    found, start = Suites(name), time.monotonic()
    code = pytest.main(["-q", "--rootdir", str(ROOT), str(ROOT / "tests")], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the attacks could not be run: pytest ended with {code!r} after {time.monotonic() - start:.0f} s")
    return [
        {"name": suite, "about": ABOUT.get(suite, ""), **{k: counts[k] for k in ("passed", "failed", "skipped")},
         "seconds": round(found.seconds[suite], 1), "date": time.strftime("%Y-%m-%d"), "fails": found.failed[suite]}
        for suite, counts in sorted(found.outcomes.items())
    ]  # fmt: skip

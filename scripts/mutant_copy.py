"""A copy of the package in which bugs are planted, and tests that are run against it.

Every run is a fork of a process that has imported torch and transformers already: to import them again for each of a few
hundred runs would take longer than most tests. The package itself is imported by the child, from the copy. Rejected: one
subprocess each (simple, and about six seconds of a core each time); to import the package once and exchange functions (what is
planted would not be what a user gets).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, LATE, NOT_COLLECTED = "passed", "failed", "late", "not collected"
WARM = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "scipy.stats", "hypothesis", "rich.console", "typer",
    "pydantic", "yaml",
)  # fmt: skip
"""Imported before the first fork; none of them imports the package."""


class Copy:
    """A copy of the package in which bugs are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, str(ROOT))
        for name in ("tests.conftest", *WARM):  # the first sets what torch and Triton read when they are imported
            importlib.import_module(name)

    def write(self, file: str, text: str) -> None:
        """Replace a file. Python takes a compiled file for new that was written in the same second: it is deleted."""
        path = self.folder / "src" / "shaketable" / file
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: list[str], patience: float) -> tuple[str, str]:
        """Run tests until one fails or `patience` seconds of processor time are over: what came of it, and which failed."""
        told = self.folder / "told.json"
        told.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            self._run(tests, patience, told)
        status = _waited(child, 4 * patience + 60)
        if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return LATE, ""
        found = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
        if found.get("failed"):
            return FAILED, found["failed"]
        crashed = found.get("began", "")  # a process that died, as of a segmentation fault, was in this test
        if found.get("exit") is None:
            return (FAILED, crashed) if crashed else (NOT_COLLECTED, "")
        return (PASSED, "") if found["exit"] in (0, 5) else (NOT_COLLECTED, "")

    def _run(self, tests: list[str], patience: float, told: Path) -> None:
        """In the child: never returns."""
        import pytest

        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(patience), int(patience) + 5))
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(self.folder / "src")
        sys.path.insert(0, str(self.folder / "src"))
        for name in [n for n in sys.modules if n.partition(".")[0] in ("shaketable", "tests")]:
            del sys.modules[name]
        with (self.folder / "said.txt").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", *tests]
        watch = _Watch(told)
        watch.facts["exit"] = int(pytest.main(words, plugins=[watch]))
        watch.save()
        os._exit(0)


class _Watch:
    """A plugin of pytest: writes down which test runs, and the first that fails."""

    def __init__(self, told: Path) -> None:
        self.told, self.facts = told, {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.facts["began"] = nodeid
        self.save()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.facts.setdefault("failed", report.nodeid)
            self.save()

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.facts.setdefault("failed", report.nodeid or "collecting")
            self.save()

    def save(self) -> None:
        self.told.write_text(json.dumps(self.facts), encoding="utf-8")


def _waited(child: int, patience: float) -> int | None:
    """The exit status of a child; None when it has been ended, with all that it started, because time was over."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

"""The table of docs/frameworks.md is what the tests of frameworks said when they were last run."""

import json
import subprocess
import sys

from tests import ROOT


def test_the_table_is_what_the_tests_said():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compatibility.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_what_was_run_has_not_failed():
    files = sorted((ROOT / "tests" / "frameworks" / "results").glob("*.json"))
    assert {"core", "verl", "vllm"} <= {file.stem for file in files}
    for file in files:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        assert rows and all(passed and not failed for *_, passed, failed in rows), file

"""The table of docs/frameworks.md has a row for every test of a framework, with what came of it when it was last run."""

import json
import runpy
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "compatibility.py"
FILES = sorted((ROOT / "tests" / "frameworks").rglob("test_*.py"))


def test_the_table_is_what_the_tests_said():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_of_tests_in_a_framework_is_a_row(path):
    marks = list(runpy.run_path(str(SCRIPT))["marks"](path))
    assert marks, f"{path.name} has no @pytest.mark.covers(framework, what, mode)"
    table = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    for framework, what, mode in marks:
        assert any(line.startswith(f"| {framework} |") and f"| {what} | {mode} |" in line for line in table.splitlines())


def test_what_was_run_has_not_failed():
    files = sorted((ROOT / "tests" / "frameworks" / "results").glob("*.json"))
    assert {"core", "verl", "vllm"} <= {file.stem for file in files}
    for file in files:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        assert rows
        assert all(passed and not failed for _, _, _, passed, failed, *_ in rows), file

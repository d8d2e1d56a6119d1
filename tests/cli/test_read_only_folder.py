"""A folder that nobody may write to: what only reads works, and what writes is one line and exit 2."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from shaketable.faults.cpu import native
from shaketable.records.record import FILE, RunRecord
from shaketable.study.store import summaries
from tests.cli.command_server import shaketable

pytestmark = pytest.mark.attack("read-only folders")
NOBODY = 65534
AS_NOBODY = f"import os, shaketable.cli.study_terminal, shaketable.study.store\nif os.getuid() == 0: os.seteuid({NOBODY})\n"
"""Run before the command: permissions do not bind root. Python itself may lie where only root can read, hence the imports."""


@contextmanager
def as_nobody():
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.fixture
def folder():
    """Not pytest's own: that one is for its owner alone."""
    made = Path(tempfile.mkdtemp())
    RunRecord.create(made / "store" / "run", "train", {"steps": 1}, {}).append("finished", step=1)
    RunRecord.create(made / "store" / "begun", "train", {"model": "nano", "task": "arithmetic", "steps": 1}, {}).append(
        "step", step=1
    )
    for path in [made, *made.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield made
    for path in [made, *made.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(made)


def test_records_are_read_where_nothing_can_be_written(folder):
    with as_nobody():
        assert not os.access(folder, os.W_OK, effective_ids=True)
        assert [s.status for s in summaries(folder / "store")] == ["partial", "done"]
        assert RunRecord.open(folder / "store" / "begun").events("step")[0]["step"] == 1
    assert sorted(path.name for path in (folder / "store").iterdir()) == ["begun", "run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["study", "list", "--store", "store"], "no study was run"), (["study", "verify", "store"], "2 records, unchanged")],
)
def test_commands_that_only_read_work(folder, words, said):
    done = shaketable(folder, *words, first=AS_NOBODY)
    assert done.code == 0, done.stderr
    assert said in done.stdout


RUN = ["run", "--plan", "gain:0.1@module.linear"]
WRITES = {
    "locate": ["locate", "nano", "--mode", "host", "--tokens", "4", "--json", "out.json"],
    "run": [*RUN, "--ledger", "ledgers", "--", "echo", "ran"],
    "train": ["train", "nano", "--task", "arithmetic", "--steps", "1", "--out", "run"],
    "resume": ["train", "--resume", "store/begun"],
}


@pytest.mark.parametrize("name", WRITES)
def test_commands_that_write_are_one_line(folder, name):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = shaketable(folder, *WRITES[name], first=AS_NOBODY)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cannot ") and "Permission denied" in last, last
    assert "ran" not in done.stdout.split()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert (folder / "store" / "run" / FILE).exists()


def test_a_cache_that_cannot_be_used_costs_only_speed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path / "file"))
    assert native._built() is None

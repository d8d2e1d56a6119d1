"""A clock that jumps: numbers, listings and what was decided before a run do not depend on it."""

import itertools
import random
import shutil
import time

import pytest
import torch
from typer.testing import CliRunner

from shaketable.cli import app
from shaketable.models import NANO
from shaketable.records.record import RunRecord, unique_folder
from shaketable.report.study_html import page
from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.findings import changes
from shaketable.study.analysis.results import Findings
from shaketable.study.cells import cells_of
from shaketable.study.file import parse_study
from shaketable.study.run_cell import do
from shaketable.study.store import define, defines, summaries, verify
from tests.study.small_studies import data, findings

pytestmark = pytest.mark.attack("a jumping clock")
YEAR = 365 * 24 * 3600.0


def backwards(start):
    return (start - 1000.0 * n for n in itertools.count())


def to_and_fro(start):
    chance = random.Random(0)
    return (start + chance.uniform(-30, 30) * YEAR for _ in itertools.count())


def small(**more):
    """Two arms of one model, one by its name and one by its folder, which are only scored."""
    evaluate = {"n": 2, "mechanism": False, "conditions": {"noise": "relative_gaussian:0.2@op.matmul"}}
    arms = {"as it comes": {"train": False}, "again": {"train": False, "model": str(NANO)}}
    primary = {"a": "again", "b": "as it comes", "condition": "noise"}
    return parse_study(data(arms=arms, seeds=1, evaluate=evaluate, compare={"primary": primary}) | more)


def done(store):
    torch.set_num_threads(1)
    asked = small()
    define(asked, store)
    for cell in cells_of(asked):
        assert do(cell, "small", store / "small" / "runs", "test") == "done"
    return findings(asked, store / "small")


def numbers(found):
    return [a["scores"] for a in found["arms"]], [{**c, "seconds": 0} for c in found["comparisons"]], found["notes"]


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return numbers(done(tmp_path_factory.mktemp("steady")))


def test_a_study_has_its_numbers_and_its_page_under_a_clock_that_jumps(tmp_path, monkeypatch, steady):
    times = to_and_fro(time.time())
    monkeypatch.setattr(time, "time", lambda: next(times))
    found = done(tmp_path)
    assert numbers(found) == steady
    assert all(run["seconds"] is None or run["seconds"] >= 0 for run in found["runs"])
    assert [(defines(s), s.status) for s in summaries(tmp_path)] == [(True, "partial"), (False, "done"), (False, "done")]
    assert verify(tmp_path)["bad"] == 0
    assert "again" in page(Findings.model_validate(found)) and "again" in markdown(Findings.model_validate(found))
    listed = CliRunner().invoke(app, ["study", "list", "--store", str(tmp_path)])
    assert listed.exit_code == 0, listed.output


def ended(store):
    """A run of the study that has ended."""
    RunRecord.create(store / "small" / "runs" / "some", "evaluate", {}, {}).append("finished", step=0)


def named_before(asked, store):
    return changes(asked, store / "small", [])[0]


@pytest.mark.parametrize("clock", [backwards, to_and_fro])
def test_a_comparison_named_before_the_run_stays_so_and_one_named_after_does_not(tmp_path, monkeypatch, clock):
    """Whoever sets the clock back cannot name the comparison afterwards, and whose clock was wrong is not accused."""
    times = clock(time.time())
    monkeypatch.setattr(time, "time", lambda: next(times))
    first, other = small(), small(compare={"primary": {"a": "as it comes", "b": "again", "condition": "noise"}})
    define(other, tmp_path)
    define(first, tmp_path)
    ended(tmp_path)
    assert named_before(first, tmp_path), "its second version, but before any run"
    define(other, tmp_path)
    assert not named_before(other, tmp_path)


def test_a_definition_that_was_thrown_away_and_written_anew_is_no_name_before_the_run(tmp_path):
    define(small(), tmp_path)
    ended(tmp_path)
    assert named_before(small(), tmp_path)
    shutil.rmtree(tmp_path / "small" / "definition")
    define(small(), tmp_path)
    assert not named_before(small(), tmp_path)


def test_runs_of_one_moment_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "strftime", lambda form: "20261118-120000")
    first = unique_folder(tmp_path, "run")
    RunRecord.create(first, "train", {}, {}).append("finished", step=0)
    assert unique_folder(tmp_path, "run") != first

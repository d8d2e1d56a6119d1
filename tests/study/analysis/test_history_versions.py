"""Versions of a study written by hand, with their times: which one was in force when the first run ended, and what is told."""

import pytest

from shaketable.records.record import RunRecord
from shaketable.study.analysis.findings import changes
from shaketable.study.runs import Run
from shaketable.study.store import described
from tests.study.small_studies import data, study

TWO, THREE, FOUR = study(), study(seeds=3), study(seeds=4)


def written(folder, monkeypatch, *versions):
    """A definition of (study, time, whether there were results; None for one so old that it does not say)."""
    record = RunRecord.create(folder / "definition", "study", described(versions[0][0]), {}, {"study": "small"})
    for asked, when, late in versions:
        monkeypatch.setattr("time.time", lambda when=when: float(when))
        record.append("defined", config=described(asked), **({} if late is None else {"after_results": late}))
    return folder


def ended(when, name="x"):
    return [Run(name, "train", "arm", 0, "done", {}, [{"event": "finished", "time": float(when)}])]


@pytest.mark.parametrize(
    ("versions", "end", "in_time"),
    [
        ([(TWO, 10, False), (THREE, 20, False), (FOUR, 200, True)], 100, THREE),  # the last one before the results
        ([(TWO, 500, False), (THREE, 50, True)], 100, TWO),  # what a version says itself counts more than the clock
        ([(TWO, 10, None), (THREE, 50, None), (FOUR, 200, None)], 100, TWO),  # of those that do not say, the first counts
    ],
)
def test_which_version_was_in_force_when_the_first_run_ended(tmp_path, monkeypatch, versions, end, in_time):
    written(tmp_path, monkeypatch, *versions)
    for asked, *_ in versions:
        named, notes = changes(asked, tmp_path, ended(end))
        assert named == (asked is in_time) == (not notes)


def test_a_note_names_what_decides_and_was_changed(tmp_path, monkeypatch):
    written(tmp_path, monkeypatch, (TWO, 10, False))
    arms = {**data()["arms"], "new": {}}
    found = changes(study(seeds=3, train=data()["train"] | {"steps": 9}, arms=arms), tmp_path, ended(100))
    late = "changed in this report only, after the first run had ended"
    assert found[1] == [f"{late}: seeds, train; read the primary comparison as exploratory"]

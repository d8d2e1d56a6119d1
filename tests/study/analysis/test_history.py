"""What was decided when: the first end of any run of a study's folder, and every part of a study that is not what it was."""

import copy
import shutil
import time

import pytest

from shaketable.records.record import RunRecord
from shaketable.study.analysis.history import (
    DECIDES,
    Changes,
    _decisive,
    _first_end,
    _is_before,
    _others,
    _told,
    _when,
    changes,
)
from shaketable.study.analysis.runs import Run
from shaketable.study.run_study import define, described
from tests.study.small_studies import data, study


def run_that_ended(name, *times):
    return Run(name, "train", "arm", 0, "done", {}, [{"event": "finished", "time": time} for time in times])


@pytest.mark.parametrize("order", [(30.0, 10.0, 20.0), (10.0, 20.0, 30.0), (20.0, 30.0, 10.0)])
def test_the_first_end_is_the_earliest_of_all_runs(tmp_path, order):
    assert _first_end(tmp_path, [run_that_ended(f"r{i}", time) for i, time in enumerate(order)]) == 10.0
    assert _first_end(tmp_path, [Run("x", "train", "arm", 0, "partial", {}, [])]) is None
    assert _first_end(tmp_path, []) is None


def test_a_run_of_an_earlier_version_counts_and_a_damaged_one_does_not(tmp_path, monkeypatch):
    for name, now in (("old", 5.0), ("known", 1.0), ("damaged", 2.0), (".hidden", 3.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        RunRecord.create(tmp_path / "runs" / name, "train", {}, {}).append("finished")
    path = next((tmp_path / "runs" / "damaged").glob("*.jsonl"))
    path.write_text("{}\n" + path.read_text())
    assert _first_end(tmp_path, [run_that_ended("known", 9.0)]) == 5.0, "what is known is asked of its run, not of the disk"
    shutil.rmtree(tmp_path / "runs" / "old")
    assert _first_end(tmp_path, [run_that_ended("known", 9.0)]) == 9.0


@pytest.mark.parametrize(
    ("version", "before"),
    [
        ({"after_results": False, "time": 99.0}, True),
        ({"after_results": True, "time": 1.0}, False),
        ({"time": 10.0}, True),
        ({"time": 9.0}, True),
        ({"time": 10.1}, False),
    ],
)
def test_a_version_says_itself_whether_it_came_before_the_results_and_for_old_ones_the_clock_does(version, before):
    assert _is_before(version, 10.0) is before


NOW = described(study())


def other(value):
    return [*value, "other"] if isinstance(value, list) else {"other": value}


@pytest.mark.parametrize("name", DECIDES)
def test_whatever_decides_is_named_by_itself(name):
    then = copy.deepcopy(NOW) | {name: other(NOW.get(name))}
    assert _decisive(NOW, then) == [name] and _decisive(NOW, NOW) == [] == _others(NOW, then)


def test_what_decides_is_all_that_numbers_depend_on():
    assert set(DECIDES) == {"model", "task", "seeds", "train", "harden", "evaluate", "diagnose", "device", "dtype"}
    assert set(DECIDES) - {"harden"} <= NOW.keys(), "which is there only where a study has it"


def test_arms_of_the_primary_comparison_decide_and_others_do_not():
    primary = NOW["compare"]["primary"]
    inside = {primary["a"], primary["b"]}
    assert inside < set(NOW["arms"]), "the study has more arms than those two"
    for name in NOW["arms"]:
        changed, told = copy.deepcopy(NOW), copy.deepcopy(NOW)
        changed["arms"][name] = other(NOW["arms"][name])
        told["arms"][name]["description"] = "another text"
        gone = copy.deepcopy(NOW)
        del gone["arms"][name]
        for then in (changed, gone):
            assert _decisive(NOW, then) == ([f"the arm {name!r}"] if name in inside else [])
            assert _others(NOW, then) == ([] if name in inside else [f"the arm {name!r}"])
        assert _decisive(NOW, told) == [] == _others(NOW, told), "wording is no decision"


def test_other_comparisons_and_a_primary_one_that_was_another_are_named():
    then = copy.deepcopy(NOW)
    then["compare"]["primary"] = None
    assert _decisive(NOW, then)[0] == "the primary comparison (it was not named)"
    for key in ("secondary", "against"):
        then = copy.deepcopy(NOW)
        then["compare"][key] = "something else"
        assert (_decisive(NOW, then), _others(NOW, then)) == ([], [f"compare.{key}"])
    assert _told({"a": "x", "b": "y", "condition": "noise", "endpoint": "accuracy"}) == "x − y, noise accuracy"
    assert _told({"a": "x", "b": "y", "condition": None, "endpoint": "reward"}) == "x − y, reward"


def test_a_change_has_the_time_of_its_first_version():
    versions = [{"config": {"a": 0}, "time": 0.0}, {"config": {"a": 1}, "time": 3661.0}, {"config": {"a": 1}, "time": 9999.0}]
    assert _when({"a": 1}, versions) == "on 1970-01-01 at 01:01 UTC"
    assert _when({"a": 2}, versions) == "in this report only"


# ---- the whole of it


@pytest.fixture
def defined(tmp_path):
    """A study that was written down, in its folder."""
    define(study(), tmp_path)
    return tmp_path / "small"


def test_a_study_without_a_finished_run_was_named_before(defined):
    assert changes(study(), defined, []) == Changes(True, [])
    assert changes(study(), defined, [Run("x", "train", "arm", 0, "partial", {}, [])]) == Changes(True, [])


def test_a_study_that_was_never_run_from_its_file_says_so(tmp_path):
    wanted = "the study was never run from its file: nothing says when its comparison was named"
    assert changes(study(), tmp_path, []) == Changes(False, [wanted])


def test_a_definition_that_was_changed_by_hand_tells_nothing(defined):
    path = next((defined / "definition").glob("*.jsonl"))
    path.write_text(path.read_text().replace("noise", "Noise", 1))
    found = changes(study(), defined, [])
    assert not found.named_before and found.notes[0].startswith("when the comparison was named cannot be told: ")
    assert "was changed at line" in found.notes[0]


def test_runs_that_others_had_made_before_the_study_was_written_down_prove_nothing(defined):
    added = [{"event": "added", "ended": 1.0}, {"event": "finished", "time": 2e9}]
    found = changes(study(), defined, [Run("x", "added", "arm", 0, "done", {}, added)])
    why = (
        "runs that were made elsewhere had ended before the study was written down: nothing says when its comparison was named"
    )
    assert found == Changes(False, [why])
    added[0]["ended"] = 2e9
    assert changes(study(), defined, [Run("x", "added", "arm", 0, "done", {}, added)]).named_before


def test_nothing_is_said_of_a_study_that_is_what_it_was_and_all_that_changed_is(defined):
    ended = [run_that_ended("x", time.time() + 50)]
    assert changes(study(), defined, ended) == Changes(True, [])
    found = changes(study(seeds=3), defined, ended)
    late = "changed in this report only, after the first run had ended"
    assert found == Changes(False, [f"{late}: seeds; read the primary comparison as exploratory"])
    arms = data()["arms"] | {"new": {}}
    assert changes(study(arms=arms), defined, ended) == Changes(True, [f"{late}, beside the primary comparison: the arm 'new'"])
    both = changes(study(seeds=3, arms=arms), defined, ended)
    assert not both.named_before and len(both.notes) == 2


@pytest.mark.parametrize("options", [{"steps": 500}, {}])
def test_options_of_hardening_that_were_changed_after_the_results_are_told(tmp_path, options):
    def made(**options):
        arms = {"a": {"harden": {}, "plan": "noise"}, "b": {"train": False}}
        return study(arms=arms, compare={"primary": {"a": "a", "b": "b", "condition": "noise"}}, harden=options)

    define(made(steps=5), tmp_path)
    ended = [Run("x", "harden", "a", 0, "done", {}, [{"event": "finished", "time": time.time() + 50}])]
    folder = next(p.parent for p in tmp_path.rglob("definition"))
    assert changes(made(steps=5), folder, ended) == Changes(True, [])
    found = changes(made(**options), folder, ended)
    assert not found.named_before and "harden" in found.notes[0]

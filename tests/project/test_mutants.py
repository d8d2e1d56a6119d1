"""The list of planted bugs is one that can be planted, and the script tells a catch from a miss."""

import importlib.util
import json

import pytest

from tests import ROOT


@pytest.fixture
def mutants(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "mutants", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "mutants.json")
    return module


def test_nearly_every_bug_is_a_line_that_is_there_and_leaves_python_behind(mutants):
    every = [m for name in mutants.NAMES for m in mutants.read(name)]
    assert len({(m.file, m.old, m.new) for m in every}) == len(every)
    there = [m for m in every if m.is_there]
    assert len(there) > 0.8 * len(every), "the lists are about another package: make a new one"
    for mutant in there:
        compile(mutant.text(), mutant.file, "exec")
        assert mutant.old != mutant.new and len(mutant.old.strip().splitlines()) <= 5
        for test in mutant.tests:
            assert (ROOT / "tests" / test.split("::")[0]).exists(), test


@pytest.mark.slow
def test_a_caught_bug_a_missed_one_and_a_run_that_goes_on(mutants, tmp_path):
    def plant(new):
        return mutants.Mutant(
            "tried", "launch/process_identity.py", "if self.label else", new, ("launch/test_process_identity.py::" + TEST,)
        )

    results, said = mutants.Results(), []
    caught, missed = plant("if not self.label else"), plant("if bool(self.label) else")
    mutants.run([caught, missed], results, said.append)
    rows = json.loads(mutants.RESULTS.read_text())["rows"]
    assert [r["caught_by"] for r in rows] == [f"launch/test_process_identity.py::{TEST}", None]
    assert mutants.Results().is_known(caught) and mutants.Results().survived(missed)
    assert "| tried | 2 | 2 | 1 (50 %) | 1 (50 %) |" in mutants.page(results.body) and "**nothing**" in mutants.page(
        results.body
    )
    assert "NOT CAUGHT" in said[-1] and "without a bug" in said[0]


TEST = "test_a_child_of_an_actor_says_so"


def test_a_line_that_is_gone_is_not_planted(mutants):
    assert not mutants.Mutant("tried", "plan.py", "no such line", "", ()).is_there
    assert not mutants.Mutant("tried", "no_such_file.py", "x", "y", ()).is_there


def test_a_sample_is_drawn_by_its_seed_from_every_part_of_the_core(mutants):
    sample = __import__("mutant_sample")
    found = list(sample.draw(31))
    assert found == list(sample.draw(31)) != list(sample.draw(32))
    assert len(found) == sample.EACH * len(sample.CORE) == len(set(found))
    parts = {str(file.relative_to(sample.PACKAGE)).split("/")[0] for file, _ in found}
    assert parts == set(sample.CORE)
    for file, line in found:
        assert file.read_text(encoding="utf-8").splitlines()[line - 1].strip()


def test_a_bug_that_was_drawn_meets_the_tests_of_its_module_first_and_slow_ones_do_not_count(mutants, monkeypatch, tmp_path):
    drawn = next(m for m in mutants.read("third_fresh") if m.file == "plan.py" and m.is_drawn)
    assert drawn.tests[0] == "test_plan.py" and len(drawn.tests) > 1
    copy = mutants.Copy(tmp_path / "copy")
    monkeypatch.setattr(copy, "test", lambda tests, patience=0: (mutants.LATE, "still running"))
    assert mutants.plant(copy, drawn) is None
    monkeypatch.setattr(copy, "test", lambda tests, patience=0: (mutants.FAILED, "test_plan.py::test_always_fails"))
    with pytest.raises(SystemExit, match="fails without any bug"):
        mutants.plant(copy, drawn)

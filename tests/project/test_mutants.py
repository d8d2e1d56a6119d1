"""The list of planted bugs is one that can be planted, and the script tells a catch from a miss."""

import importlib.util
import json
from dataclasses import replace

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
        assert mutant.old != mutant.new and len(mutant.old.strip().splitlines()) <= 9
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
    for i, (file, line) in enumerate(found):
        assert str(file.relative_to(sample.PACKAGE)).startswith(sample.CORE[i // sample.EACH])
        assert file.read_text(encoding="utf-8").splitlines()[line - 1].strip()


def test_bugs_by_rule_are_fifty_small_changes_that_python_reads(mutants):
    operators = __import__("mutant_operators")
    rows = operators.sample(7)
    assert rows == operators.sample(7) != operators.sample(8) and len({str(row) for row in rows}) == len(rows) == 50
    for row in rows:
        mutant = mutants.Mutant("tried", **row, tests=())
        assert mutant.is_there and row["old"] != row["new"]
        compile(mutant.text(), row["file"], "exec")


CHANGES = {
    "if a < b:\n    pass\n": {"a <= b"},
    "x = a is not None and b in c\n": {"a is None and", "and b not in c", "or b in c"},
    "x = 3 if not a else True\n": {"4 if", "True if not a else 3", "3 if a else", "else False"},
    "f(a, b, c=d)\n": {"f(b, a, c=d)", "f(a, b)", "pass"},
    "x += a - 1\n": {"x = a - 1", "a + 1", "a - 2"},
}


@pytest.mark.parametrize("text", CHANGES)
def test_what_is_changed_by_rule(mutants, tmp_path, text):
    operators = __import__("mutant_operators")
    (tmp_path / "x.py").write_text(text)
    file = operators.File(tmp_path / "x.py")
    found = [text[:a] + new + text[b:] for a, b, new in file.changes(1)]
    assert len(found) == len(CHANGES[text])
    assert all(any(wanted in changed for changed in found) for wanted in CHANGES[text])


RECORDED = {
    "seconds": {
        "tests/a.py::slow": 9.0,
        "tests/a.py::quick": 0.5,
        "tests/b.py::quick": 0.1,
        "tests/b.py::broken": float("inf"),
    },
    "lines": {
        "plan.py": {
            "": "1-400",
            "tests/a.py::slow (call)": "190-200",
            "tests/a.py::quick (call)": "195-195",
            "tests/b.py::quick (setup)": "300-310",
            "tests/b.py::broken (call)": "1-400",
        }
    },
}


def test_a_line_is_asked_about_by_the_tests_that_execute_it_quickest_first(mutants, monkeypatch, tmp_path):
    lines = __import__("line_tests")
    monkeypatch.setattr(lines, "KEPT", tmp_path)
    body = RECORDED | {"sources": {"plan.py": lines._sources()["plan.py"]}}
    (tmp_path / "tests.json").write_text(json.dumps(body))
    inside = next(n for n in range(195, 201) if lines._statements(lines.PACKAGE / "plan.py", n, n))
    assert lines.Recorded().tests_of("plan.py", inside, inside)[-1] == "tests/a.py::slow"
    assert lines.Recorded().tests_of("plan.py", 1, 1) == ["tests/b.py::quick", "tests/a.py::quick", "tests/a.py::slow"], (
        "what is executed on import concerns every test of the file"
    )
    with pytest.raises(SystemExit, match=r"no test was recorded with models.py as it is"):
        lines.Recorded().tests_of("models.py", 1, 1)
    (tmp_path / "tests.json").write_text(json.dumps(body | {"sources": {"plan.py": "as it was"}}))
    with pytest.raises(SystemExit, match=r"plan\.py as it is"):
        lines.Recorded().tests_of("plan.py", inside, inside)


@pytest.mark.usefixtures("mutants")
def test_lines_that_were_recorded_are_found_where_they_are_by_now():
    lines = __import__("line_tests")
    old, new = ["a", "b", "c", "d", "e"], ["new", "a", "B", "B2", "c", "more", "e"]
    found = lines._matched(old, new)
    assert found == {1: {1, 2}, 2: {3, 4}, 3: {5}, 4: {6}, 5: {7}}, "d became more; what is before all is at the first line"
    assert lines._matched(["a", "b"], ["b"]) == {1: set(), 2: {1}}
    assert lines._matched(["a", "b"], ["a", "new", "b"]) == {1: {1, 2}, 2: {3}}
    assert lines._moved("plan.py", "as it never was") == {}


def test_a_bug_that_keeps_tests_from_being_collected_has_a_key_too(mutants):
    (bug, *_) = mutants.read("first")
    bug = replace(bug, tests=())
    assert bug.key("collecting") == bug.key("collecting") != bug.key("test_plan.py::test_a") != bug.key()


class FakeCopy:
    """A copy in which some tests fail: alone with the bug, after others, or anyway."""

    def __init__(self, fails):
        self.fails, self.has_bug, self.runs = fails, False, []

    def write(self, file, text):
        self.has_bug = "BUG" in text

    def test(self, tests, patience):
        self.runs.append(tests)
        bad = [t for t in tests if self.fails.get(t) == "anyway" or (self.has_bug and self.fails.get(t) == "with the bug")]
        bad += [t for t in tests[1:] if self.fails.get(t) == "after others"]
        failed = next((t for t in tests if t in bad), None)
        return ("failed", failed) if failed else ("passed", "")


@pytest.mark.parametrize(
    ("fails", "by"),
    [
        ({}, None),
        ({"tests/b": "with the bug"}, "b"),
        ({"tests/a": "anyway"}, None),
        ({"tests/b": "after others"}, None),
        ({"tests/a": "anyway", "tests/b": "after others", "tests/c": "with the bug"}, "c"),
    ],
)
def test_a_bug_is_caught_by_a_test_that_fails_alone_with_it_and_passes_without(mutants, monkeypatch, fails, by):
    asked = ["tests/a", "tests/b", "tests/c"]
    monkeypatch.setattr(mutants, "Recorded", lambda: type("R", (), {"tests_of": lambda self, *line: asked})())
    drawn = mutants.Mutant("tried", "plan.py", "class Plan(BaseModel):", "class Plan(BaseModel):  # BUG", (), is_drawn=True)
    copy = FakeCopy(fails)
    assert mutants.plant(copy, drawn)[0] == by
    assert not copy.has_bug, "the copy is clean again"
    if by:
        copy.runs.clear()
        assert mutants.plant(copy, drawn, known=by) == (by, "as before") and copy.runs == [[f"tests/{by}"]] * 2


@pytest.mark.parametrize("few", [1, 2, 300])
def test_the_quickest_are_asked_first_and_the_others_when_those_have_passed(mutants, monkeypatch, few):
    asked = ["tests/a", "tests/b", "tests/c"]
    monkeypatch.setattr(mutants, "Recorded", lambda: type("R", (), {"tests_of": lambda self, *line: asked})())
    monkeypatch.setattr(mutants, "FEW", few)
    drawn = mutants.Mutant("tried", "plan.py", "class Plan(BaseModel):", "class Plan(BaseModel):  # BUG", (), is_drawn=True)
    copy = FakeCopy({"tests/c": "with the bug"})
    assert mutants.plant(copy, drawn)[0] == "c"
    assert copy.runs[0] == asked[:few]


@pytest.mark.parametrize(("without", "by"), [("passed", "collecting"), ("not collected", None)])
def test_tests_that_were_recorded_and_are_gone_are_no_miss(mutants, monkeypatch, without, by):
    class Uncollected(FakeCopy):
        def test(self, tests, patience):
            return ("not collected" if self.has_bug else without), ""

    monkeypatch.setattr(mutants, "Recorded", lambda: type("R", (), {"tests_of": lambda self, *line: ["tests/a"]})())
    drawn = mutants.Mutant("tried", "plan.py", "class Plan(BaseModel):", "class Plan(BaseModel):  # BUG", (), is_drawn=True)
    if by:
        assert mutants.plant(Uncollected({}), drawn)[0] == by
    else:
        with pytest.raises(SystemExit, match=r"tests that were recorded are gone.*plan\.py"):
            mutants.plant(Uncollected({}), drawn)


def test_what_is_tried_is_not_kept_and_a_line_that_is_gone_is_told(mutants, monkeypatch, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("- {file: plan.py, old: no such line, new: x}\n- {file: plan.py, old: 'class Plan(BaseModel):', new: y}\n")
    monkeypatch.setattr("sys.argv", ["mutants.py", "--try", str(file), "--jobs", "3"])
    seen = []
    monkeypatch.setattr(mutants, "run", lambda asked, results, say, jobs: seen.append((asked, jobs)) or results.save())
    mutants.main()
    ((asked, jobs),) = seen
    assert [m.new for m in asked] == ["y"] and jobs == 3 and asked[0].list == "mine"
    assert "not there, or more than once: plan.py: no such line" in capsys.readouterr().out
    assert not mutants.RESULTS.exists()

"""The file that Python runs at start-up: it gives way to another of its name, and asks to be called for torch."""

import os
import runpy
import sys
from types import ModuleType

import pytest

import shaketable.launch
from shaketable.launch import import_hooks
from shaketable.launch.run import STARTUP

FILE = str(STARTUP / "sitecustomize.py")


class Left(BaseException):
    """Raised where the process would end."""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Python as it starts with our folder in front, and a folder of somebody else behind it."""
    ours = ModuleType("sitecustomize")
    done = {"installed": 0, "ours": ours}
    for name in ("SHAKETABLE_PLAN", "SHAKETABLE_KEYS_READ"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [str(STARTUP), str(tmp_path)])
    monkeypatch.setitem(sys.modules, "sitecustomize", ours)
    monkeypatch.setattr(import_hooks, "install", lambda: done.__setitem__("installed", done["installed"] + 1))

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    return done


def theirs(folder, text):
    (folder / "sitecustomize.py").write_text(text)


def test_where_there_is_no_other_ours_stays_and_the_path_is_as_it_was(start, tmp_path):
    runpy.run_path(FILE)
    assert sys.modules["sitecustomize"] is start["ours"] and sys.path == [str(STARTUP), str(tmp_path)]
    assert start["installed"] == 0


def test_another_runs_once_takes_the_name_and_the_path_is_as_it_was(start, tmp_path, capsys):
    theirs(tmp_path, "import sys\nprint('theirs', len(sys.path))\n")
    runpy.run_path(FILE)
    assert sys.modules["sitecustomize"].__file__ == str(tmp_path / "sitecustomize.py")
    assert capsys.readouterr().out == "theirs 1\n" and sys.path == [str(STARTUP), str(tmp_path)]


def test_another_that_misses_a_module_raises_as_it_would_without_us(start, tmp_path):
    theirs(tmp_path, "import no_such_module_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        runpy.run_path(FILE)
    assert sys.path == [str(STARTUP), str(tmp_path)]


@pytest.mark.parametrize("spelled", ["", ".", "/", "/../startup"])
def test_our_own_folder_is_not_taken_for_another_however_it_is_written(start, tmp_path, monkeypatch, spelled):
    monkeypatch.chdir(STARTUP)
    path = [f"{STARTUP}{spelled}" if spelled.startswith("/") else spelled, str(tmp_path)]
    monkeypatch.setattr(sys, "path", path)
    runpy.run_path(FILE)
    assert sys.modules["sitecustomize"] is start["ours"] and sys.path == path


@pytest.mark.parametrize(
    ("variables", "installed"),
    [
        ({}, 0),
        ({"SHAKETABLE_PLAN": "gain:1@layer.1"}, 1),
        ({"SHAKETABLE_PLAN": ""}, 0),
        ({"SHAKETABLE_KEYS_READ": "/x"}, 0),
        ({"SHAKETABLE_PLAN": "gain:1@layer.1", "SHAKETABLE_KEYS_READ": "/x"}, 1),
    ],
)
def test_imports_are_watched_where_there_is_a_plan(start, monkeypatch, variables, installed):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(FILE)
    assert start["installed"] == installed


@pytest.mark.parametrize("variable", ["SHAKETABLE_PLAN", "SHAKETABLE_KEYS_READ", None])
def test_a_python_without_the_package_is_left_at_once_where_anybody_counts_on_it(start, monkeypatch, capsys, variable):
    monkeypatch.delattr(shaketable.launch, "import_hooks")
    monkeypatch.setitem(sys.modules, "shaketable.launch.import_hooks", None)
    if variable is None:
        runpy.run_path(FILE)
        assert capsys.readouterr().err == ""
        return
    monkeypatch.setenv(variable, "x")
    with pytest.raises(Left, match=r"^2$"):
        runpy.run_path(FILE)
    said = capsys.readouterr().err
    assert said.startswith(f"shaketable: cannot shake {sys.executable}: ")
    assert said.endswith(". Install shaketable there.\n") and said.count("\n") == 1

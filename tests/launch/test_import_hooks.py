"""Being told when a module has been imported."""

import importlib
import importlib.util
import sys

import pytest

from shaketable.launch.import_hooks import WATCHED, AfterImport, install


def test_two_who_watch_are_both_told(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    told = []
    first, second = {"json": lambda module: told.append("first")}, {"json": lambda module: told.append("second")}
    for watched in (first, second, first):
        install(watched)
    assert told == ["first", "second"], "each once"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A module that nobody has imported, which notes that it has run."""
    (tmp_path / "a_fresh_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "a_fresh_module"
    sys.modules.pop("a_fresh_module", None)


def test_a_module_is_told_of_once_and_after_it_has_run(fresh):
    told = []
    install({fresh: lambda module: told.append((module, module.value)), "no_such_module": told.append})
    assert told == [], "it is not imported yet"
    module = importlib.import_module(fresh)
    importlib.import_module(fresh)
    assert told == [(module, 7)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert importlib.util.find_spec("another_one_that_is_not_there") is None


def test_what_is_imported_already_is_told_at_once_and_is_the_module_itself(fresh):
    module, told = importlib.import_module(fresh), []
    install({fresh: told.append})
    assert told == [module]


def test_who_watches_comes_before_those_who_find(fresh):
    before = list(sys.meta_path)
    watched = {fresh: lambda module: None}
    install(watched)
    assert isinstance(sys.meta_path[0], AfterImport) and sys.meta_path[0].watched is watched and sys.meta_path[1:] == before


def test_these_are_watched():
    assert set(WATCHED) == {
        "torch", "transformers.generation.utils", "ray", "vllm.v1.worker.worker_base", "vllm.v1.engine.core",
        "vllm.config", "vllm.entrypoints.cli.main", "vllm.v1.engine.core_client", "vllm.v1.executor.abstract",
    }  # fmt: skip

"""Functions that are called when a module has been imported."""

import importlib
import importlib.util
import sys

import pytest

from shaketable.launch.import_hooks import install


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A module that nobody has imported, which notes that it has run."""
    (tmp_path / "a_fresh_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "a_fresh_module"
    sys.modules.pop("a_fresh_module", None)


def test_each_function_is_called_once_after_the_module_has_run(fresh):
    called = []
    first = {fresh: lambda module: called.append((1, module.value)), "no_such_module": called.append}
    second = {fresh: lambda module: called.append((2, module.value)), "json": lambda module: called.append("json")}
    for watched in (first, second, first):
        install(watched)
    assert called == ["json"], "imported already; the other is not yet"
    importlib.import_module(fresh)
    importlib.import_module(fresh)
    assert sorted(called[1:]) == [(1, 7), (2, 7)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert importlib.util.find_spec("another_one_that_is_not_there") is None

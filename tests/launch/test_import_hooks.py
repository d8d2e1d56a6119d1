"""Being told when a module has been imported."""

import sys

from shaketable.launch.import_hooks import install


def test_two_who_watch_are_both_told(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    told = []
    first, second = {"json": lambda module: told.append("first")}, {"json": lambda module: told.append("second")}
    for watched in (first, second, first):
        install(watched)
    assert told == ["first", "second"], "each once"

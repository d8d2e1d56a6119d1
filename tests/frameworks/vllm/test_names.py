"""vLLM's next release: with a name that we need renamed, instructions are refused and not forgotten."""

import importlib

import pytest

from shaketable.integrations.names import CLASSES, OBJECTS
from shaketable.integrations.vllm import register

pytestmark = pytest.mark.covers("vLLM", "a renamed method is refused with the releases that work", "no engine")

NAMES = [(owner, name) for owner, names in CLASSES.items() if owner.startswith("vllm.") for name in names if name != "__init__"]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_program_that_was_told_to_shake_ends_where_a_name_is_gone(monkeypatch, capsys, owner, name):
    path, _, kind = owner.partition(":")
    found = getattr(importlib.import_module(path), kind)
    monkeypatch.delattr(found, name)
    monkeypatch.setenv("SHAKETABLE_PLAN", "gain:0.1@layer.1")
    with pytest.raises(SystemExit) as end:
        register()
    assert end.value.code == 2
    assert f"{kind}.{name} (needed: " in capsys.readouterr().err


def test_a_worker_has_what_is_asked_of_it(engine):
    assert [name for name in OBJECTS["vllm worker"] if not hasattr(engine.worker, name)] == []

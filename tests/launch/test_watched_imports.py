"""Being told of an import: packages, modules that fail, folders without code, and names that are not there."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from shaketable.launch import import_hooks
from shaketable.launch.import_hooks import AfterImport, install
from shaketable.sites.phases import current_phase, current_rollout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("watched_")]:
        del sys.modules[name]


def package(folder, name, **modules):
    (folder / name).mkdir()
    for module, text in {"__init__": "", **modules}.items():
        (folder / name / f"{module}.py").write_text(text)
    importlib.invalidate_caches()


def test_a_module_of_a_package_is_told_and_the_package_and_its_other_modules_are_not(folder):
    package(folder, "watched_p", inner="value = 1\n", other="value = 2\n")
    told = []
    install({"watched_p.inner": told.append})
    assert importlib.import_module("watched_p.other").value == 2 and told == []
    inner = importlib.import_module("watched_p.inner")
    assert told == [inner] and inner.value == 1 and sys.modules["watched_p"].inner is inner


def test_each_of_several_is_told_to_whom_it_is_for(folder):
    package(folder, "watched_p", a="", b="")
    told = []
    install({name: lambda module, name=name: told.append((name, module.__name__)) for name in ("watched_p", "watched_p.b")})
    importlib.import_module("watched_p.a")
    importlib.import_module("watched_p.b")
    assert told == [("watched_p", "watched_p"), ("watched_p.b", "watched_p.b")]


def test_a_module_that_raises_is_not_told_until_it_has_run(folder):
    told = []
    (folder / "watched_m.py").write_text("raise ZeroDivisionError\n")
    install({"watched_m": told.append})
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("watched_m")
    assert told == [] and "watched_m" not in sys.modules
    (folder / "watched_m.py").write_text("import sys; value = 'another text, of another length'\n")
    importlib.invalidate_caches()
    assert told == [importlib.import_module("watched_m")]


def test_a_folder_without_code_is_imported_and_told_to_nobody(folder):
    (folder / "watched_empty").mkdir()
    told = []
    install({"watched_empty": told.append})
    assert importlib.import_module("watched_empty").__name__ == "watched_empty" and told == []


def test_a_module_whose_package_is_not_there_can_be_imported_once_it_is(folder):
    told = []
    install({"watched_late.inner": told.append})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("watched_late.inner")
    finder = sys.meta_path[0]
    with pytest.raises(ModuleNotFoundError):
        finder.find_spec("watched_late.inner", None)
    assert finder.busy == set(), "a search that raised is over"
    package(folder, "watched_late", inner="")
    assert told == [importlib.import_module("watched_late.inner")]


def test_nothing_is_searched_for_what_nobody_watches_nor_while_it_is_searched_already(folder):
    (folder / "watched_m.py").write_text("")
    finder = AfterImport({"watched_m": lambda module: None})
    assert finder.find_spec("watched_other", None) is None
    spec = finder.find_spec("watched_m", None)
    assert spec.name == "watched_m" and spec.origin == str(folder / "watched_m.py") and finder.busy == set()
    finder.busy.add("watched_m")
    assert finder.find_spec("watched_m", None) is None and finder.busy == {"watched_m"}


def test_what_whoever_is_told_raises_is_raised_by_the_import(folder):
    (folder / "watched_m.py").write_text("")

    def refuse(module):
        raise ImportError("this one is refused")

    install({"watched_m": refuse})
    with pytest.raises(ImportError, match="this one is refused"):
        importlib.import_module("watched_m")


def test_modules_that_are_there_already_are_told_at_once_and_only_once(folder):
    package(folder, "watched_p", a="", b="")
    found, told = importlib.import_module("watched_p.a"), []
    watched = {"watched_p.a": told.append, "watched_p.b": told.append}
    install(watched)
    install(watched)
    assert told == [found] and sum(isinstance(f, AfterImport) and f.watched is watched for f in sys.meta_path) == 1
    assert told[1:] == [] and importlib.import_module("watched_p.b") is told[1]


def test_generate_is_a_rollout_of_its_own_keeps_its_name_and_gives_on_what_it_is_given():
    class GenerationMixin:
        def generate(self, *args, **kwargs):
            return args, kwargs, current_rollout() is not None, current_phase(False)

    import_hooks._on_generate(SimpleNamespace(GenerationMixin=GenerationMixin))
    assert GenerationMixin().generate(1, a=2) == ((1,), {"a": 2}, True, "rollout")
    assert GenerationMixin.generate.__name__ == "generate" and current_rollout() is None

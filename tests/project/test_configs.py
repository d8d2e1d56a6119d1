"""What a user can set: names, words, bounds and defaults of every config, as they are written down beside this file.

Defaults and bounds are promises: studies that leave them out are repeated by others. A change that is meant shows in the diff of
`configs.txt`, which `python -m tests.project.test_configs` writes; one that is not meant fails here.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

import shaketable

FILE = Path(__file__).with_name("configs.txt")
FRAMEWORKS = ("vllm", "verl", "ray", "gpu", "startup", "__main__")
RESULTS = ("results",)
"""Modules of what was found; nobody sets it."""
READ_FROM_OTHERS = {"aqn.guidance._Place", "aqn.guidance._Statistics", "aqn.guidance.LayerDiagnosis"}
"""Parts of files of others, which have more in them than we need."""


def configs():
    """Every config of the package, by its name."""
    for module in pkgutil.walk_packages(shaketable.__path__, "shaketable."):
        if not set(module.name.split(".")) & set(FRAMEWORKS):
            importlib.import_module(module.name)
    found, left = {}, [BaseModel]
    while left:
        kinds = left.pop().__subclasses__()
        left += kinds
        found |= {_name(kind): kind for kind in kinds if kind.__module__.startswith("shaketable.")}
    return {name: kind for name, kind in sorted(found.items()) if not set(name.split(".")) & {*FRAMEWORKS, *RESULTS}}


def _name(kind):
    return f"{kind.__module__}.{kind.__name__}".removeprefix("shaketable.")


def described(kind):
    """A line for each field: its default, its bounds, and the words that it takes."""
    for name, field in kind.model_fields.items():
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        bounds = [repr(rule) for rule in field.metadata if type(rule).__module__ == "annotated_types"]
        yield " ".join([f"{_name(kind)}.{name} = {default}", *bounds, *_words(field.annotation)])


def _words(annotation):
    inside = get_args(annotation)
    return [repr(word) for word in inside] if get_origin(annotation) is Literal else [w for a in inside for w in _words(a)]


def whole():
    return "".join(f"{line}\n" for kind in configs().values() for line in described(kind))


def test_every_field_has_the_words_the_bounds_and_the_default_that_are_written_down():
    assert whole().splitlines() == FILE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("what", ["frozen", "extra"])
def test_no_config_changes_or_takes_a_field_that_it_does_not_know(what):
    wanted = {"frozen": True, "extra": "forbid"}[what]
    loose = {name for name, kind in configs().items() if kind.model_config.get(what) != wanted}
    assert loose == (READ_FROM_OTHERS if what == "extra" else set())


if __name__ == "__main__":
    FILE.write_text(whole(), encoding="utf-8")

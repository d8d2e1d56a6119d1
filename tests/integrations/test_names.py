"""What our modules need of frameworks, and what they import: every process of verl, vLLM and Hydra loads some of them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from shaketable.errors import ShaketableError
from shaketable.integrations.names import OBJECTS, check_object, tables
from tests import ROOT


def test_the_page_lists_every_name():
    assert tables() in (ROOT / "docs" / "frameworks.md").read_text(), (
        "write what `names.tables()` returns at the end of the page"
    )


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OBJECTS.items() for name in names])
def test_an_object_without_a_name_is_refused(kind, name):
    found = SimpleNamespace(**{other: None for other in OBJECTS[kind] if other != name})
    with pytest.raises(ShaketableError, match=rf"has no \S+\.{name} \(needed: .*was tested with"):
        check_object(kind, found)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("verl", "torch pydantic verl"),
        ("vllm", "torch pydantic vllm"),
        ("verl.settings", "torch verl"),
        ("job_keys", "torch verl"),
        ("origin_configs.translate", "torch verl omegaconf"),
    ],
)
def test_what_processes_of_a_framework_load_is_light(module, heavy):
    code = f"import sys, shaketable.integrations.{module}; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

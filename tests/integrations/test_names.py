"""What our modules need of frameworks, and what they import: every process of verl, vLLM and Hydra loads some of them."""

import subprocess
import sys

import pytest

from shaketable.integrations.names import tables
from tests import ROOT


def test_the_page_lists_every_name():
    assert tables() in (ROOT / "docs" / "frameworks.md").read_text(), (
        "write what `names.tables()` returns at the end of the page"
    )


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

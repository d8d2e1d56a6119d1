"""A checkout that is not installed anywhere is found by the frameworks that look for plugins."""

import os
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("vllm.general_plugins", "shaketable.integrations.vllm:register"),
        ("verl.plugins", "shaketable.integrations.verl"),
    ],
)
def test_plugins_are_found_by_their_entry_points(tmp_path, group, value):
    subprocess.run([sys.executable, ROOT / "scripts" / "checkout_metadata.py", tmp_path], check=True)
    code = f"from importlib.metadata import entry_points; print({value!r} in [p.value for p in entry_points(group={group!r})])"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"

"""The command `vllm` of a wheel that is not called vllm, under `shaketable run`: one line that says what to type."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shaketable.integrations.vllm import run_with_a_name

MAIN = """
import importlib.metadata

def main():
    print(importlib.metadata.version("vllm"))
"""


@pytest.fixture
def command(tmp_path):
    """What pip writes for the command of a package whose metadata has another name."""
    folder = tmp_path / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(MAIN)
    script = tmp_path / "script.py"
    script.write_text("from vllm.entrypoints.cli.main import main\nmain()\n")
    return script


def test_a_vllm_of_another_name_is_told_in_one_line(command, tmp_path):
    run = [sys.executable, "-m", "shaketable", "run", "--plan", "gain:0.1@layer.0", "--ledger", tmp_path / "ledger", "--"]
    done = subprocess.run([*map(str, run), sys.executable, str(command), "serve"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[0].startswith("shaketable: this vLLM was not installed under the name vllm")
    assert "python -m vllm.entrypoints.openai.api_server --model MODEL" in done.stderr.splitlines()[0]


def test_other_errors_of_the_command_stay_what_they_are():
    def main():
        raise ModuleNotFoundError("No module named 'uvloop'")

    with pytest.raises(ModuleNotFoundError, match="uvloop"):
        run_with_a_name(main)

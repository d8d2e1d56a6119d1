"""What must not happen: a program that was told to shake, goes on, and is not shaken. And the reverse."""

from __future__ import annotations

import json
import sys

import pytest

from shaketable.integrations.common.worker_report import merged, read_reports
from tests.frameworks.vllm.small_engines import NANO, PROMPTS
from tests.frameworks.vllm.vllm_programs import FOLDER, answers, offline, printed, run, shaken

pytestmark = pytest.mark.covers("vLLM", "broken or missing plugin, inert worker: refused", "eager, own processes")

PLAN = "gain:0.3@layer.2"
PROGRAM = (sys.executable, FOLDER / "offline.py", NANO)
WITH_OPTIONS = (sys.executable, FOLDER / "with_options.py", NANO)


@pytest.fixture
def broken(tmp_path):
    """A Python path on which our instructions cannot be imported: an installation that does not fit its vLLM."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'shaketable.integrations.common.instructions':\n"
        "            raise ImportError('not the pydantic that shaketable needs')\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return str(tmp_path / "broken")


def test_a_worker_that_injects_nothing_stops_the_program():
    result = run(sys.executable, FOLDER / "stripped.py", NANO, PLAN)
    assert result.returncode != 0
    assert "went on" not in result.stdout
    assert (
        f"shaketable: {PLAN} was on in " in result.stderr
        and "never fired in the first forward of this vLLM worker\n" in result.stderr
    )


def test_a_broken_plugin_stops_a_program_with_a_plan_in_its_environment(broken):
    result = offline(PYTHONPATH=broken, SHAKETABLE_PLAN=PLAN)
    assert result.returncode == 2
    assert "shaketable cannot inject faults into this vLLM: ImportError: not the pydantic" in printed(result)
    assert "answers" not in result.stdout


def test_a_broken_plugin_stops_a_program_whose_config_has_a_plan(broken):
    body = json.dumps({"shaketable": {"plan": PLAN}})
    code = f"from vllm import LLM; LLM({str(NANO)!r}, enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.1, additional_config={body}); print('went on')"
    result = run(sys.executable, "-c", code, PYTHONPATH=broken)
    assert result.returncode != 0
    assert "shaketable cannot inject faults into this vLLM" in printed(result)
    assert "went on" not in result.stdout


def test_a_broken_plugin_does_not_disturb_a_program_without_instructions(broken, tmp_path, oracle):
    result = offline(tmp_path / "answers.json", PYTHONPATH=broken)
    assert result.returncode == 0, printed(result)[-3000:]
    assert [ids for ids, _ in answers(tmp_path / "answers.json")] == [ids for ids, _ in oracle.answer(PROMPTS)]


def test_vllm_without_plugins_is_reached_by_run(tmp_path):
    result = shaken(PLAN, tmp_path / "ledger", *PROGRAM, VLLM_PLUGINS="")
    assert result.returncode == 0, printed(result)[-3000:]
    assert json.loads((tmp_path / "ledger" / "ledger.json").read_text())["forward"] > 0


def test_vllm_without_plugins_is_reached_by_options_and_a_change_that_would_leave_its_cache_is_an_error(tmp_path):
    result = run(*WITH_OPTIONS, PLAN, tmp_path / "ledger", VLLM_PLUGINS="")
    ledger = merged(read_reports(tmp_path / "ledger"))
    assert f"fires {ledger.forward}" in result.stdout and ledger.forward > 0, printed(result)[-3000:]
    assert result.returncode != 0
    assert "the engine's prefix cache was not reset: VLLM_PLUGINS must name shaketable" in printed(result)

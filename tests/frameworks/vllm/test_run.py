"""Programs that sample with vLLM and know nothing of us: `shaketable run`, and a plan in the environment alone."""

from __future__ import annotations

import json
import sys

import pytest

import shaketable as st
from shaketable.integrations.common.worker_report import read_reports
from shaketable.plan import Plan
from tests.frameworks.vllm.small_engines import NANO, PROMPTS
from tests.frameworks.vllm.vllm_programs import FOLDER, answers, complete, printed, serving, shaken

pytestmark = pytest.mark.covers(
    "vLLM", "`shaketable run` of programs and of `vllm serve`; `--additional-config`", "eager, own processes"
)

PLAN = "gain:0.3@layer.2; saturation:0.6,scope=token@module.rmsnorm,point=input"
PROGRAM = (sys.executable, FOLDER / "offline.py", NANO)
SMALL = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--gpu-memory-utilization", "0.1")


@pytest.fixture(scope="module")
def should(oracle):
    """What transformers computes under the plan."""
    with st.inject(oracle.model, PLAN):
        return oracle.answer(PROMPTS)


def agree(found, should):
    return [ids for ids, _ in found] == [ids for ids, _ in should] and [p for _, p in found] == pytest.approx(
        [p for _, p in should], abs=1e-4
    )


def sampler_of(ledger):
    """The one process of a merged ledger that injected anything."""
    (worker,) = [worker for worker in ledger["workers"] if worker["forward"]]
    return worker


def test_an_offline_program_is_shaken_in_its_engine_process(tmp_path, should):
    result = shaken(PLAN, tmp_path / "ledger", *PROGRAM, tmp_path / "answers.json")
    assert result.returncode == 0, printed(result)[-3000:]
    assert agree(answers(tmp_path / "answers.json"), should)
    ledger = json.loads((tmp_path / "ledger" / "ledger.json").read_text())
    assert [site["matched"] for site in ledger["sites"]] == [1, 17]
    assert [site["measured_magnitude"] for site in ledger["sites"]] == pytest.approx([0.3, 0.6], rel=1e-3)
    assert sampler_of(ledger)["models"] == ["LlamaForCausalLM"]
    assert len(ledger["workers"]) > 1
    assert "LlamaForCausalLM" in result.stderr


def test_a_server_is_shaken_and_leaves_its_ledger_when_it_is_told_to_go(tmp_path):
    before = (sys.executable, "-m", "shaketable", "run", "--plan", PLAN, "--ledger", tmp_path / "ledger", "--")
    with serving(tmp_path, *SMALL, before=before) as port:
        assert complete(port)
    ledger = json.loads((tmp_path / "ledger" / "ledger.json").read_text())
    assert sampler_of(ledger)["models"] == ["LlamaForCausalLM"]
    assert all(site["forward"] > 0 for site in ledger["sites"])


def test_a_server_with_a_plan_in_its_config_says_so_and_leaves_a_ledger(tmp_path):
    with serving(tmp_path, *SMALL, "--additional-config", json.dumps({"shaketable": {"plan": PLAN}})) as port:
        lines = said(tmp_path)
        assert len(lines) == 1
        assert lines[0].startswith(f"shaketable: {Plan.parse(PLAN).text()} will act on LlamaForCausalLM (process ")
        assert complete(port)
        assert "gain:0.3@layer.2 fired 1 times at 1 site, 0.3 measured of 0.3 asked for" in said(tmp_path)[1]
    (folder,) = (tmp_path / "ledgers").iterdir()
    (report,) = read_reports(folder)
    assert [site["forward"] > 0 for site in report["plan"]["sites"]] == [True, True]
    assert str(folder) in lines[0]


def said(folder):
    """Our lines in the log of a server."""
    return [line[line.index("shaketable: ") :] for line in (folder / "log").read_text().splitlines() if "shaketable: " in line]

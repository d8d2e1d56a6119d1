"""Plans that vLLM cannot do: refused before it starts a process where the config shows it, else with the reason as the last line."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest

from shaketable.errors import PlanError, ShaketableError
from shaketable.integrations.vllm import options, refusals
from tests.frameworks.vllm.small_engines import NANO, SHAPE, start
from tests.frameworks.vllm.vllm_programs import FOLDER, shaken

pytestmark = pytest.mark.covers("vLLM", "plans that cannot work: refused at the start, in one line", "eager, own processes")

PLAN = "gain:0.3@layer.2"
WHY = "module.q_proj: LlamaForCausalLM computes q_proj inside of qkv_proj, for which write module.qkv_proj"
PROGRAM = (sys.executable, FOLDER / "offline.py", NANO)


def test_two_plans_for_one_worker_are_an_error(monkeypatch):
    monkeypatch.setenv("SHAKETABLE_PLAN", "gain:0.1@layer.3")
    with pytest.raises(ShaketableError, match="additional_config and the environment order different plans"):
        configure(**options(plan=PLAN))


def configure(**more):
    """All that vLLM does before it starts a process."""
    from vllm import EngineArgs

    return EngineArgs(model=str(NANO), **SHAPE, **more).create_engine_config()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("gain:0.1@layer.99", "layer 99 is out of range; this model has layers 0-7"),
        ("gain:0.1@module.linear,phase=train", "nothing of it can act where nothing is trained"),
    ],
)
def test_what_the_config_shows_to_be_impossible_is_refused_before_a_process_is_started(plan, why):
    with pytest.raises(PlanError, match=why):
        configure(**options(plan=plan))
    with pytest.raises(PlanError, match=why):
        configure(additional_config={"shaketable": {"plan": plan}})


STANDSTILL = r"global_decay:0.05-0.0005,stages=10: nothing moves this vLLM along the schedule.* constant:0.05, or total_steps"


def test_a_schedule_that_a_server_has_nobody_for_is_refused_before_a_process_is_started():
    """σ stayed at its first value, which is 0."""
    with pytest.raises(PlanError, match=STANDSTILL):
        configure(additional_config={"shaketable": {"aqn": "global_decay:0.05-0.0005,stages=10"}})
    configure(additional_config={"shaketable": {"aqn": "constant:0.05"}})


def test_a_schedule_that_no_set_step_has_begun_is_refused_at_the_first_request():
    engine = start("nano", aqn="global_decay:0.05-0.0005,stages=10")
    with pytest.raises(PlanError, match=STANDSTILL):
        engine.ask()


def test_activations_where_no_python_runs_are_refused_before_a_process_is_started(monkeypatch):
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with pytest.raises(PlanError, match="LoRA computes without calls that could be hit"):
        configure(**lora, **options(plan="gain:0.1@module.linear"))
    configure(**lora, **options(plan="gain:0.1@module.rmsnorm,point=weight"))
    config = configure(**options(plan=PLAN))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    for mode, refused in (("NONE", False), ("PIECEWISE", True)):
        config.compilation_config.cudagraph_mode = type(config.compilation_config.cudagraph_mode)[mode]
        with pytest.raises(PlanError, match="vLLM captures CUDA graphs") if refused else nullcontext():
            refusals.check(config)


def test_a_plan_that_matches_nothing_stops_a_program_under_run(tmp_path):
    result = shaken("gain:0.3@layer.2; gain:0.1@module.q_proj", tmp_path / "ledger", *PROGRAM)
    assert result.returncode == 2
    assert "answers" not in result.stdout
    assert f"shaketable: {WHY}\n" in result.stderr
    assert " ".join(result.stderr.split()).endswith(f"error: {WHY}")

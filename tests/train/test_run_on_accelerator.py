"""Training and scoring on an accelerator: the same command, bfloat16 arithmetic, float32 weights."""

from pathlib import Path

import pytest
import torch

from shaketable.evaluate.score import Condition, Evaluator
from shaketable.evaluate.tasks import load_task, sample
from shaketable.models import load_model
from shaketable.plan import Plan
from shaketable.records.record import RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training
from shaketable.train.summary import outcome

DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator")]


def test_a_run_in_bfloat16_keeps_float32_weights_and_proves_its_faults(tmp_path: Path) -> None:
    fields = {"model": "nano", "task": "arithmetic", "steps": 3, "eval_n": 32, "device": DEVICE, "dtype": "bfloat16"}
    noise = {"plan": "relative_gaussian:0.05@op.matmul", "aqn": "constant:0.05", "tis": 2.0, "micro_batch": 32}
    config = TrainConfig.checked(**fields, **noise)
    record = RunRecord.create(tmp_path / "run", "train", config.model_dump(mode="json"), {})
    training = Training(config, record)
    training.run()
    assert {p.dtype for p in training.policy.parameters()} == {torch.float32}
    assert {p.device.type for p in training.policy.parameters()} == {DEVICE}
    found = outcome(record)
    assert found["ledgers"]["plan"]["forward"] > 0 and found["ledgers"]["plan"]["backward"] > 0
    assert found["ledgers"]["aqn"]["forward"] == 3 * 17
    assert found["final"]["plan"]["measured_error"] == pytest.approx(0.05, rel=0.1)
    assert all(step["kl_sampler_trainer"] > 0 for step in found["steps"])


def test_greedy_answers_in_float32_are_those_of_the_cpu() -> None:
    task = load_task("arithmetic")
    problems = sample(task, "test", 64, 0)
    done = []
    for device in ("cpu", DEVICE):
        model, tokenizer = load_model("nano", device=device)
        done.append(Evaluator(model, tokenizer, task, problems, 32).score(Condition("clean")).answers)
    assert done[0] == done[1]


def test_a_plan_is_proven_on_the_accelerator() -> None:
    task = load_task("arithmetic")
    model, tokenizer = load_model("nano", device=DEVICE)
    evaluator = Evaluator(model, tokenizer, task, sample(task, "test", 64, 0), 64)
    found = evaluator.score(Condition.of("plan", Plan.parse("relative_gaussian:0.4@op.matmul")))
    assert found.summary()["measured_error"] == pytest.approx(0.4, rel=0.1)
    assert found.accuracy < evaluator.score(Condition("clean")).accuracy

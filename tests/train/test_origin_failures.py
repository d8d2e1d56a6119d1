"""The failures of the origin study that are about training and scoring, one test each; the numbers are those of its list.

Answer checkers (26) and random samples (29) are in tests/evaluate/tasks.
"""

import json

import pytest
import torch

import shaketable as st
from shaketable.errors import ModelError
from shaketable.evaluate.score import Condition, Evaluator
from shaketable.evaluate.tasks import load_task, sample
from shaketable.models import NANO, load_model, load_skeleton
from shaketable.train.summary import outcome
from tests.train.training_runs import trained, weights

TASK = "arithmetic"


def answers_of(folder, plan=None, n=40):
    """The saved weights, loaded anew and scored without anything of the run."""
    task = load_task(TASK)
    evaluator = Evaluator(*load_model(str(folder), dtype="float32"), task, sample(task, "test", n, 0), 64)
    condition = Condition("clean") if plan is None else Condition.of("plan", st.Plan.parse(plan))
    return [a.text for a in evaluator.score(condition).answers]


def last(training, name):
    (found,) = [c for c in training.record.events("evaluation")[-1]["conditions"] if c["name"] == name]
    return found


def texts(condition):
    return [a["text"] for a in condition["answers"]]


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory):
    """Four bits everywhere while it trains, and loud AQN."""
    folder = tmp_path_factory.mktemp("w4a4") / "run"
    return trained(folder, plan="mxfp4@module.linear", aqn="constant:0.3", eval_n=40, steps=2)


def test_05_and_19_the_clean_score_is_that_of_the_saved_weights_without_any_noise(w4a4):
    assert texts(last(w4a4, "clean")) == answers_of(w4a4.record.folder / "model")
    assert (last(w4a4, "clean")["injections"], last(w4a4, "clean")["ledger"]) == (0, None)
    assert not torch.equal(weights(w4a4.record.folder / "model")["model.norm.weight"], weights(NANO)["model.norm.weight"]), (
        "they are the trained weights and not the first ones"
    )


def test_17_a_w4a4_run_is_scored_in_w4a4(w4a4):
    scored = last(w4a4, "plan")
    assert texts(scored) == answers_of(w4a4.record.folder / "model", "mxfp4@module.linear")
    assert texts(scored) != texts(last(w4a4, "clean"))
    assert scored["injections"] > 0 and scored["measured_error"] > 0.05
    found = outcome(w4a4.record)
    assert set(found["final"]) == {"clean", "plan"}, "two scores, two columns"


def test_03_and_04_sigma_moves_with_the_steps_and_reaches_the_sampler(tmp_path):
    run = trained(tmp_path / "run", aqn="global_decay:0.5-0.1,stages=4", steps=4)
    assert [e["sigma"] for e in run.record.events("step")] == pytest.approx([0, 0.5, 0.05**0.5, 0.1], rel=1e-6)
    kl = [e["kl_sampler_trainer"] for e in run.record.events("step")]
    assert kl[0] < 1e-9 < min(kl[1:]), "the sampler has it, the trainer has not"


CONSTANT = """
from typing import ClassVar
from shaketable.evaluate.tasks import Problem, Task
from shaketable.evaluate.tasks import Score


class Constant(Task):
    name: ClassVar[str] = "constant"
    right: bool

    def problems(self, split):
        return [Problem(f"{i}+{split}", f"{i}+1=", "") for i in range(50)]

    def score(self, problem, completion):
        return Score(self.right, True)
"""


@pytest.mark.parametrize("right", [True, False])
def test_20_groups_without_variance_do_not_stop_training(tmp_path, right):
    (tmp_path / "tasks.py").write_text(CONSTANT)
    run = trained(tmp_path / "run", task=f"{tmp_path}/tasks.py:Constant,right={right},max_new_tokens=4")
    steps = run.record.events("step")
    assert [(e["step"], e["zero_variance"], e["reward"]) for e in steps] == [(n, 1.0, float(right)) for n in (1, 2, 3)]
    begin = weights(NANO)
    assert all(torch.equal(v, begin[k]) for k, v in weights(run.record.folder / "model").items()), "and teach nothing"


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lora") / "run", lora=8, lr=1e-2, eval_n=40, steps=2, plan="mxfp4@module.linear")


def test_22_a_saved_adapter_is_scored_unmerged_as_it_was_trained(lora):
    folder = lora.record.folder / "model"
    for name, plan in (("clean", None), ("plan", "mxfp4@module.linear")):
        assert texts(last(lora, name)) == answers_of(folder, plan)
    assert texts(last(lora, "clean")) != answers_of(NANO), "and the adapter is on it"
    model, _ = load_model(str(folder))
    assert any("lora_A" in name for name, _ in model.named_parameters()) and not model.training
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in load_skeleton(str(folder)).named_parameters()} == shapes


def test_an_adapter_without_its_base_or_its_weights_is_one_line(lora, tmp_path):
    config = json.loads((lora.record.folder / "model" / "adapter_config.json").read_text())
    place = tmp_path / "adapter_config.json"
    place.write_text(json.dumps(config))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(ModelError, match="adapter without weights"):
        load_model(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))
    place.write_text(json.dumps(config | {"base_model_name_or_path": "/no/such/base"}))
    for load in (load_model, load_skeleton):
        with pytest.raises(ModelError, match="is an adapter of '/no/such/base', which is not here"):
            load(str(tmp_path))

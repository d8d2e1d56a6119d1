"""Training on an accelerator: the same command, bfloat16 arithmetic, float32 weights, memory of a micro-batch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shaketable.evaluate.score import Condition, Evaluator
from shaketable.evaluate.tasks import load_task, sample
from shaketable.models import load_model
from shaketable.train.summary import outcome
from tests.train.training_runs import prepared, trained

DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator")]
FIELDS = {"device": DEVICE, "dtype": "bfloat16"}


def test_a_run_in_bfloat16_keeps_float32_weights_and_proves_its_faults(tmp_path):
    noise = {"plan": "relative_gaussian:0.05@op.matmul", "aqn": "constant:0.05", "tis": 2.0}
    training = trained(tmp_path / "run", **FIELDS, **noise, prompts=16, samples=8, micro_batch=32, eval_n=32)
    assert {p.dtype for p in training.policy.parameters()} == {torch.float32}
    assert {p.device.type for p in training.policy.parameters()} == {DEVICE}
    found = outcome(training.record)
    assert found["ledgers"]["plan"]["forward"] > 0 and found["ledgers"]["plan"]["backward"] > 0
    assert found["ledgers"]["aqn"]["sites"][0]["phases"] == {"rollout": {"forward": 3 * 17, "backward": 0}}
    assert found["final"]["plan"]["measured_error"] == pytest.approx(0.05, rel=0.1)
    assert all(step["kl_sampler_trainer"] > 0 for step in found["steps"])


def test_greedy_answers_in_float32_are_those_of_the_cpu():
    task = load_task("arithmetic")
    problems = sample(task, "test", 64, 0)
    done = []
    for device in ("cpu", DEVICE):
        model, tokenizer = load_model("nano", device=device)
        done.append(Evaluator(model, tokenizer, task, problems, 32).score(Condition("clean")).answers)
    assert done[0] == done[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_the_loss_is_that_of_a_micro_batch(tmp_path):
    """512 answers of 16 tokens over 49,152 words are 1.5 GiB of logits; the loss takes a fraction of that."""
    _, tokenizer = load_model("nano")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, **shape, pad_token_id=0, eos_token_id=1)).eval().cuda()
    sizes = {"prompts": 64, "samples": 8, "micro_batch": 64, "eval_n": 1}
    made, peaks = prepared(tmp_path / "run", loaded=(model, tokenizer), **FIELDS, **sizes), []
    own = made.trainer._compute_loss

    def watched(*args, **kwargs):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = own(*args, **kwargs)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return loss

    made.trainer._compute_loss = watched
    made.run()
    assert len(peaks) == 3 * 8
    assert max(peaks) < 512 * 16 * 49_152 * 4 / 4

"""Training on CUDA: plan and AQN act, and memory is that of a micro-batch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.train.run import Training
from tests.train.training_runs import small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def run(folder, **fields):
    config = small(**{"device": "cuda", "dtype": "bfloat16", "steps": 4, "prompts": 8, "samples": 8} | fields)
    made = Training(config, RunRecord.create(folder, "train", config.model_dump(mode="json"), {}))
    made.run()
    return made


def test_a_plan_and_aqn_act_in_rollouts(tmp_path):
    made = run(tmp_path / "run", plan="relative_gaussian:0.1@module.linear", aqn="constant:0.1")
    ledgers = made.record.events("finished")[0]["ledgers"]
    assert ledgers["aqn"]["sites"][0]["phases"] == {"rollout": {"forward": 4 * 17, "backward": 0}}
    assert ledgers["plan"]["sites"][0]["phases"]["rollout"]["forward"] > 0
    assert min(e["kl_sampler_trainer"] for e in made.record.events("step")) > 1e-6


def test_memory_of_the_loss_is_that_of_a_micro_batch(tmp_path):
    """512 answers of 16 tokens over 49,152 words are 1.5 GiB of logits; the loss takes a fraction of that."""
    _, tokenizer = load_model("nano")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, **shape, pad_token_id=0, eos_token_id=1)).eval().cuda()
    config = small(device="cuda", dtype="bfloat16", prompts=64, samples=8, micro_batch=64, steps=3, eval_n=1)
    record = RunRecord.create(tmp_path / "run", "train", config.model_dump(mode="json"), {})
    made, peaks = Training(config, record, loaded=(model, tokenizer)), []
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

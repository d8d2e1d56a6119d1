"""Training on CUDA: replayed rollouts give the run that they give without graphs, and memory is that of a micro-batch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shaketable.evaluate.decoding.static import StaticDecoding
from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.train import run as training
from shaketable.train.run import Training
from tests.train.training_runs import small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def run(folder, **fields):
    config = small(**{"device": "cuda", "dtype": "bfloat16", "steps": 4, "prompts": 8, "samples": 8} | fields)
    made = Training(config, RunRecord.create(folder, "train", config.model_dump(mode="json"), {}))
    made.run()
    return made


def facts(made):
    return [(e["step"], e["loss"], e["reward"], e["entropy"]) for e in made.record.events("step")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_nothing_of_a_run(tmp_path, monkeypatch, dtype):
    captured = run(tmp_path / "captured", dtype=dtype)
    monkeypatch.setattr(training, "StaticDecoding", lambda decoder: StaticDecoding(decoder, graphs=False))
    by_steps = run(tmp_path / "steps", dtype=dtype)
    assert captured.record.events("decoding")[-1]["how"] == "static, captured"
    assert facts(captured)[0] == pytest.approx(facts(by_steps)[0], rel=1e-3)
    assert [f[2] for f in facts(captured)] == pytest.approx([f[2] for f in facts(by_steps)], abs=0.1)


def test_every_replayed_rollout_sees_the_weights_of_its_step(tmp_path):
    """In float32 the trainer's probabilities of the sampled tokens are the sampler's, after every update."""
    made = run(tmp_path / "run", dtype="float32", steps=6)
    assert made.record.events("decoding")[-1]["how"] == "static, captured"
    assert max(e["kl_sampler_trainer"] for e in made.record.events("step")) < 1e-6


def test_autocast_leaves_no_old_weight_in_a_graph(tmp_path):
    """A graph over an old cast would drift from the trainer with every update; a large rate would show it at once."""
    made = run(tmp_path / "run", steps=8, lr=1e-3)
    kl = [e["kl_sampler_trainer"] for e in made.record.events("step")]
    assert made.record.events("decoding")[-1]["how"] == "static, captured"
    assert max(kl[2:]) < 10 * max(*kl[:2], 1e-4)


def test_rollouts_before_the_first_noise_are_captured_and_not_counted(tmp_path):
    """The first stage of AQN's decay is without noise; when it comes, the step is captured again."""
    made = run(tmp_path / "run", aqn="global_decay:0.1-0.01,stages=4")
    sigmas = [e["sigma"] for e in made.record.events("step")]
    assert sigmas[0] == 0 < sigmas[-1]
    assert [e["how"] for e in made.record.events("decoding")] == ["static, captured"]
    noisy = sum(sigma > 0 for sigma in sigmas)
    assert made.record.events("finished")[0]["ledgers"]["aqn"]["forward"] == noisy * 17


def test_a_plan_and_aqn_act_in_rollouts_whether_captured_or_not(tmp_path):
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

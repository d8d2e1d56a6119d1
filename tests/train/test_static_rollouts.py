"""Training whose rollouts are decoded in memory that stays in place, and what a step of many answers keeps in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from shaketable.evaluate.decoding.dynamic import Decoder
from shaketable.evaluate.decoding.static import StaticDecoding
from shaketable.models import NANO, load_model
from shaketable.records.record import RunRecord
from shaketable.study.cells import NEWER
from shaketable.train.run import Training
from tests.train.training_runs import prepared, small, trained, weights

NORMS = 17


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("static") / "run", decoding="static")


def facts(training):
    return [(e["step"], e["loss"], e["reward"], e["entropy"]) for e in training.record.events("step")]


def test_it_trains_and_says_how_it_decoded(static):
    assert isinstance(static.trainer.decoder, StaticDecoding)
    assert [(e["step"], e["how"]) for e in static.record.events("decoding")] == [(1, "static")]
    assert static.record.events("made_of")[0]["decoding"] == "static"
    assert [e["step"] for e in static.record.events("step")] == [1, 2, 3]
    assert static.record.events("step")[-1]["tokens_per_second"] > 0


def test_every_rollout_sees_the_weights_of_its_step(static):
    """The trainer's probabilities of the sampled tokens are the sampler's, after each update too."""
    begin, end = weights(NANO), weights(static.record.folder / "model")
    assert any(not torch.equal(begin[k], end[k]) for k in end)
    for event in static.record.events("step"):
        assert event["kl_sampler_trainer"] < 1e-9 and event["ratio_max"] == pytest.approx(1, abs=1e-3)


def test_the_same_configuration_is_the_same_run(static, tmp_path):
    torch.manual_seed(99)
    again = trained(tmp_path / "run", decoding="static")
    assert facts(again) == facts(static)
    one, other = (weights(run.record.folder / "model") for run in (static, again))
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_a_plan_and_aqn_act_in_its_rollouts(static, tmp_path):
    run = trained(tmp_path / "run", decoding="static", plan="relative_gaussian:0.2@module.linear", aqn="constant:0.1")
    ledgers = run.record.events("finished")[0]["ledgers"]
    assert ledgers["aqn"]["sites"][0]["phases"] == {"rollout": {"forward": 3 * NORMS, "backward": 0}}
    assert ledgers["plan"]["sites"][0]["phases"]["rollout"]["forward"] > 3 * 56
    assert facts(run) != facts(static)
    assert max(e["kl_sampler_trainer"] for e in run.record.events("step")) > 1e-6


def test_in_bfloat16_sampler_and_trainer_stay_close(tmp_path):
    run = trained(tmp_path / "run", decoding="static", dtype="bfloat16")
    assert max(e["kl_sampler_trainer"] for e in run.record.events("step")) < 1e-3


def test_a_run_goes_on_as_it_began(tmp_path):
    config = small()
    for begun, expected in ((None, "dynamic"), ({"decoding": "static"}, "static"), ({}, "dynamic")):
        record = RunRecord.create(tmp_path / f"{begun}", "train", config.model_dump(mode="json"), {})
        if begun is not None:
            record.append("made_of", batch_size=8, **begun)
        training = Training(config, record)
        assert training.decoding == expected
        assert isinstance(training.trainer.decoder, StaticDecoding if expected == "static" else Decoder)
    assert NEWER["decoding"] == config.decoding == "auto"


def test_a_prompt_is_tokenized_once_for_all_its_answers(tmp_path, monkeypatch):
    trainer = prepared(tmp_path / "run").trainer
    asked, kind = [], type(trainer).__mro__[1]
    own = kind._tokenize_prompts
    monkeypatch.setattr(kind, "_tokenize_prompts", lambda self, prompts: asked.append(prompts) or own(self, prompts))
    prompts = ["12+34="] * 4 + ["7+8="] * 4 + ["12+34="] * 2
    ids, images, fields = trainer._tokenize_prompts(prompts)
    assert asked == [["12+34=", "7+8=", "12+34="]]
    assert ids == [trainer.processing_class(p)["input_ids"] for p in prompts] and images is None and fields == {}


class Largest(TorchDispatchMode):
    """The largest tensor that anything makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.slow
def test_the_loss_never_holds_the_logits_of_all_answers(tmp_path):
    """A vocabulary of 49,152 and 384 answers: forward and backward make no tensor as large as all of their logits."""
    _, tokenizer = load_model("nano")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, **shape, pad_token_id=0, eos_token_id=1)).eval()
    config = small(prompts=48, samples=8, decoding="static")
    record = RunRecord.create(tmp_path / "run", "train", config.model_dump(mode="json"), {})
    trainer = Training(config, record, loaded=(model, tokenizer)).trainer
    trainer.model.train()
    batch = trainer._generate_and_score_completions([row for row in trainer.train_dataset.select(range(48)) for _ in range(8)])
    trainer.current_gradient_accumulation_steps = 1
    trainer.begin_step()
    with Largest() as seen:
        trainer._compute_loss(trainer.model, batch).backward()
    every = batch["completion_ids"].numel() * 49_152
    assert batch["completion_ids"].shape == (384, 16)
    assert seen.numel < every / 2

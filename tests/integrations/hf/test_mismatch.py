"""Sampler against trainer inside of a TRL training that samples with its own model. With vLLM: tests/frameworks/vllm."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import floor_and_share
from shaketable.integrations.hf.mismatch import MismatchCheck
from shaketable.integrations.trl import ShaketableCallback
from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.trainer import Trainer
from tests.integrations.hf.small_trainers import grpo, llama, lora, sft

NAMES = ("gap", "k3", "outside", "seconds")


def rows(trainer):
    return [row for row in trainer.state.log_history if "shaketable/mismatch/gap" in row]


def test_gap_floor_and_share_are_logged_every_so_many_steps(tmp_path):
    trainer = grpo(tmp_path, llama(), ShaketableCallback(mismatch_every=2))
    trainer.train()
    found = rows(trainer)
    assert [row["step"] for row in found] == [1, 3], "behind the first step, and two steps on"
    for row in found:
        assert all(f"shaketable/mismatch/{name}" in row for name in NAMES)
        assert 0 <= row["shaketable/mismatch/gap"] < 1e-5, "decoding and reading differ by rounding only"
    assert 0 < found[0]["shaketable/mismatch/floor"] < 1e-5
    assert any(name.startswith("shaketable/mismatch/share/") for name in found[0])
    assert "shaketable/mismatch/floor" not in found[1], "three steps of this model are no time in which to check so much"


def test_floor_and_share_come_again_when_checks_have_taken_little_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr("shaketable.integrations.common.mismatch.BUDGET", 1.0)
    (trainer := grpo(tmp_path, llama(), ShaketableCallback(mismatch_every=2))).train()
    assert ["shaketable/mismatch/floor" in row for row in rows(trainer)] == [True, True]


def test_a_training_goes_as_it_would_have_gone(tmp_path):
    model = llama()
    watched, plain = copy.deepcopy(model), copy.deepcopy(model)
    callback = ShaketableCallback(mismatch_every=1)
    (trainer := grpo(tmp_path / "a", watched, callback)).train()
    grpo(tmp_path / "b", plain, TrainerCallback()).train()
    assert len(rows(trainer)) == 3
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))
    assert "_generate_and_score_completions" not in trainer.__dict__
    assert watched.training


def test_a_sampler_that_decodes_otherwise_shows_as_a_gap_above_the_floor(tmp_path):
    model = llama()
    attention = model.model.layers[1].self_attn
    own = attention.scaling

    def wrong_in_decode(module, args, kwargs):
        module.scaling = own * (1.5 if kwargs["hidden_states"].shape[1] == 1 else 1.0)

    attention.register_forward_pre_hook(wrong_in_decode, with_kwargs=True)
    (trainer := grpo(tmp_path, model, ShaketableCallback(mismatch_every=3))).train()
    (row,) = rows(trainer)
    assert row["shaketable/mismatch/gap"] > 1e-5
    assert row["shaketable/mismatch/share/attention"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mismatch_stop": True, "aqn": "constant:0.1"}, "needs mismatch_every"),
        ({"mismatch_every": 5, "aqn": "constant:0.1"}, "without plan="),
        ({"mismatch_every": 0}, "1 or above, not 0"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, says):
    with pytest.raises(ShaketableError, match=says):
        ShaketableCallback(**arguments)


def test_a_trainer_that_does_not_sample_is_refused(tmp_path):
    with pytest.raises(ShaketableError, match="SFTTrainer does not"):
        sft(tmp_path, llama(), ShaketableCallback(mismatch_every=1)).train()


def test_adapters_are_refused(tmp_path):
    with pytest.raises(ShaketableError, match="adapters"):
        grpo(tmp_path, llama(), ShaketableCallback(mismatch_every=1), peft_config=lora()).train()


class ServedTrainer:
    """As much of a TRL trainer as the check asks for; a vLLM somewhere else has sampled, and said 0.1 too much."""

    args, temperature = SimpleNamespace(use_vllm=True), 1.0

    def __init__(self, mode="server", sleeps=False):
        self.model = llama()
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self.state = SimpleNamespace(global_step=0)
        self.vllm_generation = SimpleNamespace(mode=mode, enable_sleep_mode=sleeps, llm=None)

    @torch.no_grad()
    def _generate_and_score_completions(self, batch):
        ids = torch.tensor([[0, 3, 4, 5, 6, 7, 8], [9, 3, 4, 5, 6, 7, 0]])
        mask = ids != 0
        logits = [self.model(row[kept][None]).logits[0].log_softmax(-1) for row, kept in zip(ids, mask, strict=True)]
        told = [lp[range(len(lp) - 1), row[kept][1:]] for lp, row, kept in zip(logits, ids, mask, strict=True)]
        said = [[float(x) - 0.1 for x in row[-n:]] + [0.0] * (4 - n) for row, n in zip(told, (4, 3), strict=True)]
        parts = {"prompt": slice(0, 3), "completion": slice(3, 7)}
        made = {f"{name}_ids": ids[:, where] for name, where in parts.items()}
        made |= {f"{name}_mask": mask[:, where].long() for name, where in parts.items()}
        return made | {"sampling_per_token_logps": torch.tensor(said)}


def test_of_a_server_there_are_the_gap_and_the_trainers_floor():
    trainer = ServedTrainer()
    check = MismatchCheck(trainer, every=5, stop=False)
    trainer._generate_and_score_completions({})
    found = {name.removeprefix("shaketable/mismatch/"): value for name, value in check.logged().items()}
    assert found["gap"] == pytest.approx(0.1, rel=1e-4) and found["outside"] == 1.0
    assert found["floor"] < 1e-6
    assert not any(name.startswith(("weights", "share")) for name in found)
    trainer.state.global_step = 4
    trainer._generate_and_score_completions({})
    assert check.logged() == {}


class TruncatingTrainer(ServedTrainer):
    """Every completion was cut at the limit and is masked (`mask_truncated_completions`)."""

    def _generate_and_score_completions(self, batch):
        made = super()._generate_and_score_completions(batch)
        return made | {"completion_mask": torch.zeros_like(made["completion_mask"])}


def test_a_batch_in_which_every_completion_is_masked_ends_no_training():
    trainer = TruncatingTrainer()
    check = MismatchCheck(trainer, every=5, stop=False)
    trainer._generate_and_score_completions({})
    assert list(check.logged()) == ["shaketable/mismatch/seconds"]


def test_what_a_sampler_does_not_show_cannot_stop_a_training():
    with pytest.raises(ShaketableError, match="a vLLM server does not show them"):
        MismatchCheck(ServedTrainer(), every=5, stop=True)
    with pytest.raises(ShaketableError, match="sleep mode"):
        MismatchCheck(ServedTrainer("colocate", sleeps=True), every=5, stop=False)


def test_the_floor_has_the_rounding_of_a_log_softmax_in_float32():
    """A healthy pair in float32 was far above a floor that was of logits alone."""
    rollouts = [Rollout([3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [])]
    side = Trainer(llama(), None, "trainer")
    (own,) = side.logprobs(rollouts)
    (logits,) = side.logits(rollouts)
    fast = logits.float().log_softmax(-1)[range(8), rollouts[0].completion]
    healthy = (torch.tensor(own).double() - fast.double()).abs().mean().item()
    assert floor_and_share(side, None, rollouts)["floor"] >= healthy * 0.999 > 0

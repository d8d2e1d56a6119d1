"""Sampler against trainer inside of a TRL training, with a stand-in for vLLM. The real one: tests/frameworks/vllm."""

from types import SimpleNamespace

import pytest
import torch

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import floor
from shaketable.integrations.hf.mismatch import MismatchCheck
from shaketable.integrations.trl import ShaketableCallback
from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.trainer import Trainer
from tests.integrations.hf.small_trainers import grpo, llama, sft

GAP = [f"shaketable/mismatch/{name}" for name in ("gap", "k3", "outside")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mismatch_stop": True, "aqn": "constant:0.1"}, "mismatch_every= alone"),
        ({"mismatch_every": 5, "aqn": "constant:0.1"}, "mismatch_every= alone"),
        ({"mismatch_every": 0}, "1 or above, not 0"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, says):
    with pytest.raises(ShaketableError, match=says):
        ShaketableCallback(**arguments)


@pytest.mark.parametrize("made", [sft, grpo])
def test_a_trainer_that_does_not_sample_with_vllm_is_refused(tmp_path, made):
    with pytest.raises(ShaketableError, match="samples with vLLM"):
        made(tmp_path, llama(), ShaketableCallback(mismatch_every=1)).train()


def test_adapters_are_refused():
    trainer = ServedTrainer()
    trainer.model.peft_config = {}
    with pytest.raises(ShaketableError, match="adapters"):
        MismatchCheck(trainer, every=1, stop=False)


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
    for trainer.state.global_step in (4, 5):
        trainer._generate_and_score_completions({})
        again = check.logged()
        assert list(again) == ([] if trainer.state.global_step == 4 else GAP), "the floor is measured once"


class TruncatingTrainer(ServedTrainer):
    """Every completion was cut at the limit and is masked (`mask_truncated_completions`)."""

    def _generate_and_score_completions(self, batch):
        made = super()._generate_and_score_completions(batch)
        return made | {"completion_mask": torch.zeros_like(made["completion_mask"])}


def test_a_batch_in_which_every_completion_is_masked_ends_no_training():
    trainer = TruncatingTrainer()
    check = MismatchCheck(trainer, every=5, stop=False)
    trainer._generate_and_score_completions({})
    assert check.logged() == {}


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
    assert floor(side, None, rollouts) >= healthy * 0.999 > 0

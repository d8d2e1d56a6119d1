"""The documented snippet for verl, on a real DataProto: what its trainer is given before it computes its own log-probabilities."""

import re

import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.rollout_file import read_rollouts
from tests import ROOT

pytestmark = pytest.mark.covers("verl", "rollouts of a batch for `mismatch --rollouts`", "DataProto, no Ray")
BATCH = {
    "prompts": [[0, 5, 6], [3, 4, 9]],
    "responses": [[7, 8, 0], [2, 0, 0]],
    "attention_mask": [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]],
    "response_mask": [[1, 1, 0], [1, 0, 0]],
}


def test_rollouts_of_a_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = (ROOT / "docs" / "mismatch.md").read_text().partition("**verl**")[2]
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", part, re.DOTALL)[1], names)
    monkeypatch.setattr(RayPPOTrainer, "_compute_old_log_prob", lambda self, batch: "its own")
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    batch = DataProto.from_single_dict({k: torch.tensor(v) for k, v in BATCH.items()} | {"rollout_log_probs": logprobs})
    trainer = object.__new__(names["RecordingTrainer"])
    assert trainer._compute_old_log_prob(batch) == "its own"
    expected = [Rollout([5, 6], [7, 8], [-1.0, -2.0]), Rollout([3, 4, 9], [2], [-0.5])]
    assert read_rollouts(tmp_path / "rollouts.jsonl") == expected

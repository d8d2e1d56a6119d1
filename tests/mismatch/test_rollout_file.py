"""Rollouts as trainers name them, and one line for what is no rollout."""

import json
import re
import types

import pytest
import torch

from shaketable.errors import ShaketableError
from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.hf import HFEngine
from shaketable.mismatch.rollout_file import read_rollouts, write_rollouts
from shaketable.models import load_model
from tests import ROOT

GOOD = Rollout([5, 6], [7, 8], [-1.0, -2.0])


def read(tmp_path, *lines):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_rollouts(path)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [5, 6], "completion": [7, 8], "logprobs": [-1.0, -2.0]},
        {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [[-1.0], [-2.0]]},
        {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [[-9, -1], [-2, -9]], "logprob_token_ids": [[1, 7], [8, 1]]},
        {"prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-1.0, -2.0]},
        {"prompt_token_ids": [5, 6], "outputs": [{"token_ids": [7, 8], "logprobs": [{"7": {"logprob": -1.0, "rank": 1}}, {"8": -2.0}]}]},
        {
            "prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1],
            "completion_ids": [7, 8, 0], "completion_mask": [1, 1, 0], "sampling_per_token_logps": [-1.0, -2.0, 0.0],
        },
        {
            "prompts": [0, 5, 6], "responses": [7, 8, 0], "rollout_log_probs": [-1.0, -2.0, -1.0],
            "attention_mask": [0, 1, 1, 1, 1, 0], "response_mask": [1, 1, 0],
        },
    ],
)  # fmt: skip
def test_the_names_of_each_trainer(tmp_path, line):
    assert read(tmp_path, line) == [GOOD]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(write_rollouts([GOOD, Rollout([1], [2], [-0.5])]))
    assert read_rollouts(path) == [GOOD, Rollout([1], [2], [-0.5])]
    assert read_rollouts(path, 1) == [GOOD]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": '], "line 1 is not JSON"),
        ([], "holds no rollouts"),
        ([{"input": "a", "output": "b", "score": 1.0}], "holds text .input, output.; write prompt_ids"),
        ([{"prompt_ids": [1], "completion_ids": [2]}], "has no list sampling_per_token_logps or"),
        ([{"prompt": [1], "completion": [2, 3], "logprobs": [-1.0]}], "1 log-probabilities for 2 tokens"),
        ([{"prompt": [1], "completion": [2.5], "logprobs": [-1.0]}], "2.5 in the completion is not a token id"),
        ([{"prompt": [1], "completion": [2], "logprobs": ["x"]}], "'x' is not a log-probability"),
        ([{"prompt": [1], "completion": [2], "logprobs": [[-1.0]], "logprob_token_ids": [[9]]}], "it is not among them"),
        ([{"prompts": [1], "responses": [2, 3, 4], "rollout_log_probs": [-1, -1, -1], "response_mask": [1, 0, 1]}], "holes"),
        ([{"prompts": [1], "responses": [2, 3], "rollout_log_probs": [-1, -1], "response_mask": [1]}], "not as long as"),
    ],
)
def test_one_line_for_what_is_no_rollout(tmp_path, lines, says):
    with pytest.raises(ShaketableError, match=says):
        read(tmp_path, *lines)


def test_a_file_that_is_not_there_and_a_table_of_texts(tmp_path):
    with pytest.raises(ShaketableError, match="cannot read"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(ShaketableError, match="a table of texts"):
        read_rollouts(tmp_path / "completions_00010.parquet")


def snippet(framework):
    """The Python block of docs/mismatch.md on this framework."""
    part = (ROOT / "docs" / "mismatch.md").read_text().partition(f"**{framework}**")[2]
    return re.search(r"```python\n(.*?)```", part, re.DOTALL)[1]


def test_the_file_that_nemo_rl_writes(tmp_path):
    """Each value is the row of a batch of one; log-probabilities of the prompt and of padding are zeros."""
    row = {
        "token_ids": [[5, 6, 7, 8, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0]],
    }
    assert read(tmp_path, row | {"input_lengths": [4], "content": ["text"], "rewards": [1.0], "idx": 0}) == [GOOD]
    with pytest.raises(ShaketableError, match="holes"):
        read(tmp_path, row | {"token_loss_mask": [[0, 1, 0, 1, 0]]})


def test_the_snippet_for_openrlhf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(snippet("OpenRLHF"), names)
    names["keep"](
        types.SimpleNamespace(
            sequences=torch.tensor([[0, 5, 6, 7, 8]]),
            attention_mask=torch.tensor([[0, 1, 1, 1, 1]]),
            action_mask=torch.tensor([[0, 0, 1, 1]]),
            rollout_log_probs=torch.tensor([[0.0, 0.0, -1.0, -2.0]]),
        )
    )
    assert read_rollouts(tmp_path / "rollouts.jsonl") == [GOOD]


@pytest.mark.slow
def test_the_snippet_for_trl_in_a_real_training(tmp_path, monkeypatch):
    """GRPO with a sampler of its own (`rollout_func`), whose tokens and log-probabilities must come back from the file."""
    from datasets import Dataset
    from trl import GRPOConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    names: dict = {}
    exec(snippet("TRL"), names)
    model, tokenizer = load_model("nano")
    drawn = []

    def sample(prompts, trainer):
        ids = [tokenizer(text)["input_ids"] for text in prompts]
        engine = HFEngine(trainer.model.eval())
        found = engine.sample(ids, Sampling(6, seed=len(drawn), stop=(tokenizer.eos_token_id,)))
        trainer.model.train()
        drawn.extend(found)
        return {"prompt_ids": ids, "completion_ids": [r.completion for r in found], "logprobs": [r.logprobs for r in found]}

    usual = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    trainer = names["RecordingTrainer"](
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=GRPOConfig(output_dir="out", report_to=[], save_strategy="no", use_cpu=True, bf16=False, use_vllm=False, **usual),
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{a + 3}="} for a in range(1, 40, 2)]),
        processing_class=tokenizer,
        rollout_func=sample,
    )
    trainer.train()
    found = read_rollouts(tmp_path / "rollouts.jsonl")
    assert len(found) == len(drawn) == 8
    assert [(r.prompt, r.completion) for r in found] == [(r.prompt, r.completion) for r in drawn]
    for one, other in zip(found, drawn, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)

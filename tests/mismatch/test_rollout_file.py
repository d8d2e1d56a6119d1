"""Rollouts as trainers name them, and one line for what is no rollout."""

import json

import pytest

from shaketable.errors import ShaketableError
from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.rollout_file import read_rollouts, write_rollouts

GOOD = Rollout([5, 6], [7, 8], [-1.0, -2.0])


def read(tmp_path, *lines):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_rollouts(path)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [5, 6], "completion": [7, 8], "logprobs": [-1.0, -2.0]},
        {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-1, -2]},
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
    path.write_text(write_rollouts([GOOD, Rollout([1], [2], [-0.5], "stop")]))
    assert read_rollouts(path) == [GOOD, Rollout([1], [2], [-0.5], "stop")]
    assert read_rollouts(path, 1) == [GOOD]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": '], "line 1 is not JSON"),
        (["[1]"], "line 1 is no JSON object"),
        ([], "holds no rollouts"),
        ([{"input": "a", "output": "b", "score": 1.0}], "holds text .input, output.; write prompt_ids"),
        ([{"prompt": "a", "completion": "b"}], "holds text .prompt, completion."),
        ([{"prompt_ids": [1], "completion_ids": [2]}], "has no list sampling_per_token_logps or"),
        ([{"prompt": [1], "completion": [2, 3], "logprobs": [-1.0]}], "1 log-probabilities for 2 tokens"),
        ([{"prompt": [1], "completion": [2.5], "logprobs": [-1.0]}], "2.5 in the completion is no token id"),
        ([{"prompt": [1], "completion": [2], "logprobs": ["x"]}], "'x' is no log-probability"),
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

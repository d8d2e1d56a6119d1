"""What needs no vLLM: putting a worker's passes together, and saying that there is no vLLM. The rest: tests/frameworks/vllm."""

import importlib.util

import pytest
import torch

from shaketable.cli.mismatch import open_engine
from shaketable.integrations.vllm.engine import WorkerRecording
from shaketable.mismatch.engine import EngineError

TOKENS = [11, 12, 13, 14, 15, 16]


def write(file, passes):
    """A worker's file: in each pass it reads some ids, attends, and asks its head for the rows that are given."""
    calls = []

    def tell(number, name, kind, output, **inputs):
        calls.append({"name": name, "kind": kind, "layer": None, "pass": number, "inputs": inputs, "output": output})

    for number, (ids, heads) in enumerate(passes, 1):
        x = torch.tensor([[float(100 * number + t)] for t in ids])
        tell(number, "embed", "embedding", x, ids=torch.tensor(ids))
        tell(number, "attn", "attention", x, q=x[:, None], k=x[:, None], v=x[:, None])
        for rows in heads:
            tell(number, "lm_head", "lm_head", x[rows] + 0.5, x=x[rows])
    torch.save({"calls": calls, "routed": {}}, file)
    return file


def test_a_prompt_that_was_read_in_chunks_is_one_call_in_the_order_of_tokens(tmp_path):
    chunks = [([11, 12, 13, 14], [slice(3, 4), slice(0, 4)]), ([15, 16], [slice(1, 2), slice(0, 1)])]
    file = write(tmp_path / "recording.pt", chunks)
    embed, attention, head = WorkerRecording.load(file, TOKENS, [(0, 6)]).calls(0)
    assert embed.inputs["ids"].tolist() == TOKENS
    assert attention.inputs["positions"].tolist() == [0, 1, 2, 3, 4, 5]
    assert head.inputs["x"].flatten().tolist() == [111, 112, 113, 114, 215, 216]
    assert torch.equal(head.output, head.inputs["x"] + 0.5)


def test_an_engine_that_read_other_tokens_is_found_out(tmp_path):
    file = write(tmp_path / "recording.pt", [([11, 12, 99, 14, 15, 16], [slice(5, 6)])])
    with pytest.raises(EngineError, match="read other tokens than it was given, from token 0 on"):
        WorkerRecording.load(file, TOKENS, [(0, 6)])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_it_is_one_line():
    with pytest.raises(EngineError, match="needs vLLM in this environment: pip install vllm"):
        open_engine("vllm", "nano", {})

"""What needs no vLLM: putting a worker's passes together, and saying that there is no vLLM. The rest: tests/frameworks/vllm."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from shaketable.cli.mismatch import open_engine
from shaketable.integrations.vllm.engine import WorkerRecording
from shaketable.mismatch.engine import EngineError

TOKENS = [11, 12, 13, 14, 15, 16]


def write(folder, passes):
    """A worker's files: in each pass it reads some ids, attends, and asks its head for the rows that are given."""
    tensors, calls = {}, []

    def tell(number, name, kind, output, **inputs):
        tensors[f"{len(calls)}/output"] = output
        tensors.update({f"{len(calls)}/{key}": value for key, value in inputs.items()})
        calls.append({"name": name, "kind": kind, "layer": None, "pass": number, "inputs": list(inputs)})

    for number, (ids, heads) in enumerate(passes, 1):
        x = torch.tensor([[float(100 * number + t)] for t in ids])
        tell(number, "embed", "embedding", x, ids=torch.tensor(ids))
        tell(number, "attn", "attention", x, q=x[:, None], k=x[:, None], v=x[:, None])
        for rows in heads:
            tell(number, "lm_head", "lm_head", x[rows] + 0.5, x=x[rows].clone())
    tensors = {key: value.clone().contiguous() for key, value in tensors.items()}
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "calls.json").write_text(json.dumps({"calls": calls, "routed": []}))


def test_a_prompt_that_was_read_in_chunks_is_one_call_in_the_order_of_tokens(tmp_path):
    chunks = [([11, 12, 13, 14], [slice(3, 4), slice(0, 4)]), ([15, 16], [slice(1, 2), slice(0, 1)])]
    write(tmp_path, chunks)
    embed, attention, head = WorkerRecording.load(tmp_path, TOKENS, [(0, 6)]).calls(0)
    assert embed.inputs["ids"].tolist() == TOKENS
    assert attention.inputs["positions"].tolist() == [0, 1, 2, 3, 4, 5]
    assert head.inputs["x"].flatten().tolist() == [111, 112, 113, 114, 215, 216]
    assert torch.equal(head.output, head.inputs["x"] + 0.5)


def test_an_engine_that_read_other_tokens_is_found_out(tmp_path):
    write(tmp_path, [([11, 12, 99, 14, 15, 16], [slice(5, 6)])])
    with pytest.raises(EngineError, match="read other tokens than it was given, from token 0 on"):
        WorkerRecording.load(tmp_path, TOKENS, [(0, 6)])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_it_is_one_line():
    with pytest.raises(EngineError, match="needs vLLM in this environment: pip install vllm"):
        open_engine("vllm", "nano", {})

"""A rotation by the next position is called that."""

from dataclasses import replace

import torch

from shaketable.mismatch.operators import Judge
from shaketable.models import load_model
from tests.mismatch.pairs import record


def test_a_rotation_by_the_next_position_is_called_that():
    model, _ = load_model("nano", dtype=torch.float32)
    tokens = list(range(3, 23))
    calls = [c for c in record(model, tokens, 8, "prefill") if c.name == "model.layers.2.self_attn.rotary_k"]
    behind = [replace(c, inputs=c.inputs | {"positions": c.inputs["positions"] - 1}) for c in calls]
    judge = Judge(model, torch.float32)
    judge.judge(calls, "prefill")
    assert judge.wrong() == []
    judge.judge([replace(c, inputs={k: t[1:] for k, t in c.inputs.items()}, output=c.output[1:]) for c in behind], "decode")
    (found,) = judge.wrong()
    assert (found.looks_like, found.phase) == ("positions off by +1", "decode")

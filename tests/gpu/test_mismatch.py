"""`mismatch` on an accelerator: healthy settings are legal, and TF32 is named."""

import pytest
import torch

from shaketable.mismatch.engine import Sampling
from shaketable.mismatch.hf import HFEngine
from shaketable.mismatch.stages import Question, run_stages
from shaketable.mismatch.trainer import Trainer
from shaketable.models import load_model
from tests.mismatch import pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def verdict(dtype, **arguments):
    model, tokenizer = load_model("nano", device="cuda", dtype=getattr(torch, dtype))
    other = HFEngine.open("nano", {"device": "cuda", "dtype": dtype, **arguments})
    how = Sampling(20, stop=(tokenizer.eos_token_id,))
    return run_stages(Question(Trainer(model, tokenizer, "nano"), other, other.sample(pairs.prompts(), how), how, {}, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arguments", [{}, {"attention": "eager"}, {"batch": 1}, {"compile": True}])
def test_healthy_settings_are_legal(dtype, arguments):
    found = verdict(dtype, **arguments)
    assert found.verdict == "LEGAL", found.sentence


def test_tf32_is_named():
    found = verdict("float32", tf32=True)
    assert found.stage == "operators", found.sentence
    assert "TF32" in found.operators.wrong[0].looks_like

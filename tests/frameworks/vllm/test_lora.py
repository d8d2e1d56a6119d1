"""vLLM with LoRA: what its wrappers would never let be hit is refused."""

from __future__ import annotations

import pytest

from shaketable.errors import PlanError
from tests.frameworks.vllm.small_engines import start

pytestmark = pytest.mark.covers("vLLM", "LoRA: faults on what an adapter computes are refused", "eager, in process")


def test_what_an_adapter_computes_cannot_be_hit_and_is_refused():
    engine = start("nano", enable_lora=True, max_lora_rank=8)
    for plan in ("gain:0.1@module.linear", "gain:0.1@op.matmul"):
        with pytest.raises(PlanError, match="LoRA computes without calls"):
            engine.set_plan(plan)
    engine.set_plan("gain:0.1@module.rmsnorm,point=weight")

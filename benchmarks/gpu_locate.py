"""How long `locate` takes on a GPU, in seconds and in forwards."""

from __future__ import annotations

import time
from typing import Any

import torch

import shaketable as st
from gpu_models import SHAPES, build


def locating() -> dict[str, dict[str, Any]]:
    """Seconds of locate in device mode on 256 tokens, healthy and with a fault in layer 15, and the same in forwards."""
    found = {}
    for name in SHAPES:
        model = build(name, "cuda", torch.bfloat16)
        ids = torch.randint(0, model.config.vocab_size, (1, 256), device="cuda")
        for case, plan in (("healthy", None), ("faulty", "relative_gaussian:0.02@module.down_proj,layers=15")):
            rows = [_located(model, ids, plan) for _ in range(3)]
            found[f"{name}, {case}"] = sorted(rows, key=lambda row: row["seconds"])[1]
            print(f"{name}, {case}", found[f"{name}, {case}"], flush=True)
        del model
        torch.cuda.empty_cache()
    return found


def _located(model: Any, ids: torch.Tensor, plan: str | None) -> dict[str, Any]:
    start = time.perf_counter()
    diagnosis = st.locate(model, input_ids=ids, mode="device", plan=plan)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "forwards": diagnosis.cost_forwards, "verdict": diagnosis.sentence}

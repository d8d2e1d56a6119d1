"""What a user waits for before the steady state: the first pass under a new plan, the second, and ten with opening and closing.

Every round takes a fresh copy of the model, so that nothing an earlier injection left on a model can help:

    5 clean passes → open → 10 passes → close → 5 clean passes

The first and the second pass are compared with the median of the ten clean passes around them; opening, ten passes and closing
with the sum of those ten. Each pass is waited for, on both sides. Kernels are built before, by the same plan on another copy:
building happens once per machine, and is not what is measured here. The ledger is checked when the injection closes, as it
is for every user: a plan that changed nothing raises.

`speed.py` uses this on a CPU, `gpu.py` on a GPU.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import shaketable as st

HALF = 5
"""Clean passes before, and as many after."""
PASSES = ("first pass", "second pass", "ten passes with opening and closing")
"""The rows of a plan."""
Row = dict[str, Any]
Pass = Callable[[Any], torch.Tensor]
"""One forward of a model; returns its logits."""


def opened_rows(model: Any, plan: str, forward: Pass, rounds: int, wait: Callable[[], None] = lambda: None) -> dict[str, Row]:
    """The rows of `PASSES`: medians over the rounds."""
    _build_kernels(copy.deepcopy(model), plan, forward)
    found = []
    for number in range(rounds):
        gc.collect()  # or the copy of the round before may be freed while this one is timed
        found.append(_round(copy.deepcopy(model), plan, forward, number, wait))
    seconds = {key: statistics.median(r[key] for r in found) for key in ("clean_seconds", "opening_seconds", "closing_seconds")}
    proof = {"logits_moved": statistics.median(r["logits_moved"] for r in found)}
    rows = {name: spread([r[name] for r in found]) | seconds | proof for name in PASSES}
    rows[PASSES[-1]]["each_pass"] = [
        round(statistics.median(same), 3) for same in zip(*(r["each"] for r in found), strict=True)
    ]
    return rows


def _build_kernels(model: Any, plan: str, forward: Pass) -> None:
    with st.inject(model, plan, seed=10**6):
        for _ in range(3):  # the ledger measures the first two, and the third is a plain one
            forward(model)


def _round(model: Any, plan: str, forward: Pass, seed: int, wait: Callable[[], None]) -> dict[str, Any]:
    outputs = clean = forward(model)

    def passed() -> float:
        nonlocal outputs
        wait()
        start = time.perf_counter()
        outputs = forward(model)
        wait()
        return time.perf_counter() - start

    around = [passed() for _ in range(HALF)]
    start = time.perf_counter()
    with st.inject(model, plan, seed=seed):
        wait()
        opening = time.perf_counter() - start
        under = [passed() for _ in range(2 * HALF)]
        last = time.perf_counter()
    wait()
    closing = time.perf_counter() - last
    moved = float((outputs - clean).float().norm() / clean.float().norm())
    around += [passed() for _ in range(HALF)]
    one = statistics.median(around)
    ten, each = (opening + sum(under) + closing) / sum(around), [seconds / one for seconds in under]
    return {
        **dict(zip(PASSES, (each[0], each[1], ten), strict=True)), "each": each,
        "clean_seconds": one, "opening_seconds": opening, "closing_seconds": closing, "logits_moved": moved,
    }  # fmt: skip


def spread(ratios: Sequence[float]) -> Row:
    """Median and quartiles."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return {"ratio": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter]}

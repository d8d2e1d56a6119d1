"""Bytes per second of every fault's kernel on a GPU, beside those of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from shaketable.faults import Draw, make_fault


def bandwidth(pairs: int) -> dict[str, dict[str, float]]:
    """Bytes per second of each fault's kernel, forward, one read and one write, beside a copy's.

    What needs a number of the whole tensor first reads it twice; that is noted beside it.
    """
    shape = (8192, 8960)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    moved = 2 * x.numel() * x.element_size()
    faults = [
        {"kind": "relative_gaussian", "magnitude": 0.05}, {"kind": "absolute_gaussian", "magnitude": 0.05},
        {"kind": "noise", "magnitude": 0.05}, {"kind": "systematic_bias", "magnitude": 0.05},
        {"kind": "gain", "magnitude": 0.05},
        {"kind": "dead_zone", "magnitude": 0.01, "scope": "token"}, {"kind": "dead_zone", "magnitude": 0.01},
        {"kind": "saturation", "magnitude": 0.5, "scope": "token"}, {"kind": "mxfp4"}, {"kind": "nvfp4"},
        {"kind": "fp8_e4m3"}, {"kind": "fp8_e4m3", "scope": "token"}, {"kind": "fp8_e5m2", "scope": "block"},
    ]  # fmt: skip
    found = {"copy": _rate(lambda: y.copy_(x), moved, pairs)}
    for spec in faults:
        fault = make_fault(spec)
        whole = spec["kind"] in ("noise", "nvfp4") or (spec["kind"] in ("dead_zone", "fp8_e4m3") and "scope" not in spec)
        rate = _rate(lambda fault=fault: fault.apply(x, Draw(7)), moved, pairs)
        found[fault.text()] = rate | {"reads": 2 if whole else 1}
    return found


def _rate(run: Callable[[], Any], moved: int, pairs: int) -> dict[str, float]:
    for _ in range(3):
        run()
    times = []
    for _ in range(pairs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5e3)
    return {"terabytes_per_second": moved / statistics.median(times) / 1e12}

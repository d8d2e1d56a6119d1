"""What a step of `harden` costs on a GPU: under noise on all linears beside the same step without, in one process, by turns.

    python3 benchmarks/harden_gpu.py            # with the python3 of a machine with CUDA

A user waits for the whole command too: 200 steps with the sampling of their completions, timed once.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from shaketable.evaluate.decoding import Decoder
from shaketable.harden.config import HardenConfig
from shaketable.harden.distil import TrainingSteps
from shaketable.harden.scoring import forward_part
from shaketable.harden.students import OwnCompletions, SequenceSource, Students
from shaketable.inject import inject
from shaketable.models import load_model, quieten

HERE = Path(__file__).parent
PLANS = {
    "noise on all linears": "relative_gaussian:0.1@module.linear",
    "noise on every product": "relative_gaussian:0.1@op.matmul,direction=forward",
    "MXFP4 W4A4": "mxfp4@module.linear,point=weight+input",
}
BLOCK, ROUNDS, WARM = 8, 5, 6


def steps_of(config: HardenConfig, plan: str | None, model: Any, tokenizer: Any) -> TrainingSteps:
    """The steps of a run that is ready to go."""
    source = SequenceSource.of(config)
    decoder = Decoder.of(model, tokenizer, source.limit, 1.0)
    students = Students(model, decoder.pad, config.device, config.dtype)
    injections = [] if plan is None else [inject(model, forward_part(plan, 0), allow_inert=True)]
    completions = OwnCompletions(config, source, tokenizer, students, decoder)
    model.train()
    return TrainingSteps(config, students, injections, completions, lambda facts: None)


def timed(steps: TrainingSteps, numbers: range) -> list[float]:
    """Seconds of each of these steps; sequences are sampled before the clock starts."""
    found = []
    for step in numbers:
        steps.completions.at(step)
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps.do(step)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Print the table and write harden_gpu.json and harden_gpu.md."""
    quieten()
    config = HardenConfig(
        model="smollm2-135m", task="arithmetic,level=1", plans=(PLANS["noise on all linears"],), steps=200, batch=64, lr=1e-5,
        clean_every=0, device="cuda", dtype="bfloat16",
    )  # fmt: skip
    rows = {}
    for name, plan in PLANS.items():
        model, tokenizer = load_model(config.model, device="cuda", dtype=torch.float32)
        other, _ = load_model(config.model, device="cuda", dtype=torch.float32)
        faulty, clean = steps_of(config, plan, model, tokenizer), steps_of(config, None, other, tokenizer)
        for steps in (faulty, clean):
            timed(steps, range(WARM))
        ratios, seconds = [], []
        for first in range(WARM, WARM + ROUNDS * BLOCK, BLOCK):
            under, without = (statistics.median(timed(s, range(first, first + BLOCK))) for s in (faulty, clean))
            ratios.append(under / without)
            seconds.append(under)
        for injection in faulty.injections:
            injection.close()
        rows[name] = {"ratio": statistics.median(ratios), "seconds": statistics.median(seconds), "ratios": ratios}
        print(f"{name}: {rows[name]['ratio']:.3f} of the same step clean, {1000 * rows[name]['seconds']:.0f} ms", flush=True)
    model, tokenizer = load_model(config.model, device="cuda", dtype=torch.float32)
    whole = steps_of(config.model_copy(update={"clean_every": 2}), PLANS["noise on all linears"], model, tokenizer)
    start = time.perf_counter()
    for step in range(config.steps):
        whole.do(step)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(f"200 steps of 64 sequences, sampling included: {seconds:.1f} s")
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "whole_seconds": seconds}
    (HERE / "harden_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = ["| fault | step, of the same step without | ms |", "|---|---|---|"]
    lines += [f"| {name} | {row['ratio']:.2f} | {1000 * row['seconds']:.0f} |" for name, row in rows.items()]
    what = f"SmolLM2-135M, 64 sequences a step, bfloat16, {found['device']}, torch {torch.__version__}"
    parts = ["# What a step of harden costs", f"{what}; medians of {ROUNDS} rounds, by turns.", "\n".join(lines)]
    parts.append(f"200 steps, the sampling of their completions included: {seconds:.0f} s.")
    (HERE / "harden_gpu.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()

"""How far two settings of one Hugging Face model are apart on a GPU, and which family of operators does it.

    python3 benchmarks/mismatch_gpu.py                                    # with the python3 of a machine with CUDA
    python3 benchmarks/mismatch_gpu.py --model nano --device cpu -n 4     # to see that it runs

Each row is one run of `shaketable mismatch` with the engine `hf`, on completions that the engine drew. On a GPU
the table goes to `results/mismatch-h200.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.score import prompt_tokens
from shaketable.evaluate.tasks import load_task, sample
from shaketable.mismatch.engine import Sampling
from shaketable.mismatch.hf import HFArguments, HFEngine
from shaketable.mismatch.results import Mismatch
from shaketable.mismatch.stages import Question, run_stages
from shaketable.mismatch.trainer import Trainer
from shaketable.models import load_model, quieten

RESULTS = Path(__file__).parent.parent / "results"
HEAD = ("pair", "dtype", "KL (k3)", "mean \\|Δ log p\\|", "ratios outside [0.9, 1.1]", "floor", "verdict", "shares")


def wide_head(model: Any) -> None:
    """Logits in float32, whatever the model's dtype is."""
    head = model.get_output_embeddings()
    head.forward = lambda x: linear(x.float(), head.weight.float())


Pair = tuple[str, str, dict[str, Any], dict[str, Any], Callable[[Any], None] | None]
PAIRS: list[Pair] = [
    ("eager against compiled", "float32", {}, {"compile": True}, None),
    ("eager against compiled", "bfloat16", {}, {"compile": True}, None),
    ("sdpa against eager attention", "float32", {}, {"attention": "eager"}, None),
    ("sdpa against eager attention", "bfloat16", {}, {"attention": "eager"}, None),
    ("float32 against TF32", "float32", {}, {"tf32": True}, None),
    ("bfloat16 logits against float32 ones", "bfloat16", {}, {}, wide_head),
    ("batch 64 against 1", "float32", {"batch": 64}, {"batch": 1}, None),
    ("batch 64 against 1", "bfloat16", {"batch": 64}, {"batch": 1}, None),
    ("float32 against bfloat16", "float32", {}, {"dtype": "bfloat16"}, None),
]


def climbed(pair: Pair, model: str, device: str, n: int) -> Mismatch:
    """One row."""
    _, dtype, own, other, change = pair
    loaded, tokenizer = load_model(model, device=device, dtype=getattr(torch, dtype))
    trainer = Trainer(loaded, tokenizer, model, **own)
    engine = HFEngine.open(model, {"device": device, "dtype": dtype, **other})
    if change is not None:
        change(engine.model)
    task = load_task("arithmetic,level=2")
    prompts = [prompt_tokens(tokenizer, task, problem) for problem in sample(task, "test", n, 0)]
    how = Sampling(48, stop=Decoder.of(loaded, tokenizer, 48).ends)
    return run_stages(Question(trainer, engine, engine.sample(prompts, how), how, {}, min(n, 8)))


def row(pair: Pair, found: Mismatch) -> str:
    """One line of the table."""
    gap, floor, shares = found.gap, found.floor, found.shares
    parts = "" if shares is None else ", ".join(f"{r.family} {r.share:.0%}" for r in shares.families[:3])
    numbers = (f"{gap.k3:.2g}", f"{gap.mean_abs:.2g}", f"{gap.outside:.1%}", f"{floor.largest.mean_abs:.2g}")
    return "| " + " | ".join((pair[0], pair[1], *numbers, found.verdict, parts)) + " |"


def main() -> None:
    """Climb every pair, print the table, and write it on a GPU."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--device", default="cuda")
    options.add_argument("-n", type=int, default=64)
    asked = options.parse_args()
    quieten()
    on_gpu = asked.device.startswith("cuda")
    rows, facts = [], []
    for pair in PAIRS:
        needs_gpu = pair[3].get("tf32") or pair[3].get("compile")
        if needs_gpu and not on_gpu:
            continue
        assert HFArguments.model_validate(pair[3])
        found = climbed(pair, asked.model, asked.device, asked.n)
        rows.append(row(pair, found))
        facts.append({"pair": pair[0], "dtype": pair[1], **found.to_dict()})
        print(rows[-1], flush=True)
    device = torch.cuda.get_device_name() if on_gpu else "a CPU"
    about = f"{asked.model}, {asked.n} prompts, torch {torch.__version__}; `benchmarks/mismatch_gpu.py`."
    head = f"# Two settings of one model, on {device}\n\n{about}\n"
    table = "\n".join([head, "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *rows, ""])
    if on_gpu:
        (RESULTS / "mismatch-h200.md").write_text(table, encoding="utf-8")
        (RESULTS / "mismatch-h200.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

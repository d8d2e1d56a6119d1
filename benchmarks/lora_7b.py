"""Memory and time of LoRA steps of a model of 7B on one GPU: clean, and under noise on all linears, by turns, in one process.

    python3 benchmarks/lora_7b.py                        # Qwen2.5-7B's shape with random weights, on the accelerator
    python3 benchmarks/lora_7b.py --shape tiny --out DIR # the same program on any machine, in seconds

Weights are random, since neither memory nor time depends on them: bfloat16 for the base, float32 for the adapters, AdamW,
activation checkpointing. `scripts/training_memory.py` computes what the memory should be; both numbers are in the table. A
CPU does not tell its peak, so there that cell is empty.

Rejected: a checkpoint from a hub (15 GB to fetch, the same numbers); GRPO around the steps: sampling is measured by
benchmarks/train_gpu.py, and would hide what a step of learning takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

import shaketable as st
from shaketable.capture.reference import product_name

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from roofline import MODELS, Model  # noqa: E402
from training_memory import GIB, Way, activation_bytes, weights_bytes  # noqa: E402

TINY = Model("tiny", 64, 128, 2, 4, 2, 256)
SHAPES = {"7b": MODELS["7B"], "tiny": TINY}
PLAN = "relative_gaussian:0.05@module.linear"
WARM = 2


def build(shape: Model, rank: int, device: str) -> Any:
    """The shape with random weights, adapters on all linears, ready to train."""
    config = Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers, vocab_size=shape.vocabulary,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        base = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    ).train()


def held(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and moments that are there."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


class Steps:
    """Steps of one model on the same tokens."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.device = torch.get_device_module(ids.device)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def one(self) -> float:
        """Seconds of a step."""
        self._wait()
        start = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self._wait()
        return time.perf_counter() - start

    def peak(self) -> int | None:
        """The most bytes that were there since this was last asked; None where the device does not tell."""
        if self.ids.device.type == "cpu":
            return None
        found = int(self.device.max_memory_allocated())
        self.device.reset_peak_memory_stats()
        return found

    def _wait(self) -> None:
        if self.ids.device.type != "cpu":
            torch.accelerator.synchronize()


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Clean and shaken steps by turns."""
    shape = SHAPES[asked.shape]
    model = build(shape, asked.rank, asked.device)
    ids = torch.randint(0, shape.vocabulary, (asked.sequences, asked.tokens)).to(asked.device)
    steps, rows = Steps(model, ids), {"clean": [], PLAN: []}
    peaks: dict[str, list[int | None]] = {name: [] for name in rows}
    ledgers = []
    for turn in range(asked.turns):
        for name, seconds in rows.items():
            with nullcontext() if name == "clean" else st.inject(model, PLAN, seed=turn) as ledger:
                for _ in range(WARM):
                    steps.one()
                steps.peak()
                seconds += [steps.one() for _ in range(asked.steps)]
                peaks[name].append(steps.peak())
            ledgers += [] if ledger is None else [ledger]
    first = ledgers[0].sites[0]
    way, tokens = Way("", rank=asked.rank, base=2), asked.sequences * asked.tokens
    return {
        "device": product_name(ids.device) or asked.device,
        "versions": {"torch": torch.__version__, "shaketable": st.__version__},
        "shape": shape.name, "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rank": asked.rank, "sequences": asked.sequences, "tokens": asked.tokens,
        "held_bytes": held(model, steps.optimizer), "computed_held_bytes": weights_bytes(shape, way),
        "proof": {"fires": sum(x.forward for x in ledgers), "sites": len(first.spots), "measured_magnitude": first.magnitude},
        "rows": [
            {
                "plan": name, "steps": len(seconds), "median_s": statistics.median(seconds), "peak_bytes": _most(peaks[name]),
                "computed_bytes": weights_bytes(shape, way) + activation_bytes(shape, tokens, asked.rank),
            }
            for name, seconds in rows.items()
        ],
    }  # fmt: skip


def _most(found: list[int | None]) -> int | None:
    return max((x for x in found if x is not None), default=None)


def page(facts: dict[str, Any]) -> str:
    """The table."""
    clean, proof = facts["rows"][0]["median_s"], facts["proof"]
    lines = [
        f"# LoRA steps of {facts['shape']}",
        "",
        f"{facts['device']}, torch {facts['versions']['torch']}. {facts['parameters']:,} parameters, {facts['trained']:,} of "
        f"them trained (rank {facts['rank']}), {facts['sequences']} × {facts['tokens']} tokens. Weights, gradients and "
        f"moments: {facts['held_bytes'] / GIB:.2f} GiB, computed {facts['computed_held_bytes'] / GIB:.2f}. "
        f"Proof: {proof['fires']:,} fires at {proof['sites']} linears, magnitude {proof['measured_magnitude']:.4f}.",
        "",
        "| plan | steps | median step, s | ratio | peak, GiB | computed, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in facts["rows"]:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.1f}"
        lines.append(
            f"| {row['plan']} | {row['steps']} | {row['median_s']:.3f} | {row['median_s'] / clean:.2f} | {peak} | "
            f"{row['computed_bytes'] / GIB:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, and write lora_7b.json and lora_7b.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default=accelerator, help="where; this machine's accelerator by default")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--sequences", type=int, default=4, help="of a step")
    parser.add_argument("--tokens", type=int, default=384, help="of a sequence")
    parser.add_argument("--steps", type=int, default=8, help="timed ones, of a turn")
    parser.add_argument("--turns", type=int, default=3, help="clean, then shaken, so many times")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for lora_7b.json and lora_7b.md")
    asked = parser.parse_args()
    if asked.shape == "7b" and asked.device == "cpu":
        parser.error("the 7B shape wants an accelerator with 24 GiB; --shape tiny runs anywhere")
    facts = measure(asked)
    (asked.out / "lora_7b.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (asked.out / "lora_7b.md").write_text(page(facts), encoding="utf-8")
    print(page(facts))


if __name__ == "__main__":
    main()

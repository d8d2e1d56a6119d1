"""What `gpu.py` has measured so far, as JSON and as a page, and what it aims at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_models import NOISE, SHAPES
from targets import Target

LINEARS = "relative_gaussian on all linears"
FOR_ALL = {
    f"first pass eager, {LINEARS}": Target(1.25),
    "training step eager, op.matmul forward + backward": Target(1.20),
    "prefill eager, mxfp4 W4A4": Target(1.60),
    "rollout eager, AQN on all norms": Target(1.01),
}
TARGETS = {(shape, what): target for shape in SHAPES for what, target in FOR_ALL.items()} | {
    ("smollm2-135m", f"prefill eager, {LINEARS}"): Target(1.17),
    ("qwen2-1.5b", f"prefill eager, {LINEARS}"): Target(1.15),
    ("smollm2-135m", f"prefill compiled, {LINEARS}"): Target(1.04),
    ("qwen2-1.5b", f"prefill compiled, {LINEARS}"): Target(1.13),
    ("smollm2-135m", f"decode captured, {LINEARS}"): Target(1.10),
    ("qwen2-1.5b", f"decode captured, {LINEARS}"): Target(1.07),
    ("smollm2-135m", "training step captured, op.matmul forward + backward"): Target(1.09),
    ("smollm2-135m", "score of 256 problems, alone"): Target(1.50),
    ("smollm2-135m", "score of 256 problems, worst of four side by side"): Target(1.50),
}
ROOFLINE = tuple(f"{what}, {LINEARS}" for what in ("prefill eager", "decode eager", "decode captured"))
"""The rows of the 1.5B shape that `roofline` needs."""
PEAK = 989.0
"""Dense bfloat16 of an H100 or H200, TFLOP/s, by its data sheet."""


def roofline(facts: dict[str, Any]) -> dict[str, Any]:
    """What docs/scale.md is computed from: the 1.5B shape's share of the peak, and microseconds per layer and per hit."""
    rows, (_, _, shape) = facts["results"]["qwen2-1.5b"], SHAPES["qwen2-1.5b"]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * shape["intermediate_size"]
    work = 2 * layers * layer * 8 * 1024
    fires = 7 * layers
    prefill, eager, captured = (rows[name] for name in ROOFLINE)

    def each(row: dict[str, float]) -> float:
        return round((row["ratio"] - 1) * row["clean_seconds"] / fires * 1e6, 1)

    return {
        "device": facts["device"], "peak_tflops": PEAK, "mfu": round(work / prefill["clean_seconds"] / PEAK / 1e12, 2),
        "copy_gb_s": round(facts["bandwidth"]["copy"]["terabytes_per_second"] * 1e3),
        "kernel_gb_s": round(facts["bandwidth"][NOISE]["terabytes_per_second"] * 1e3),
        "layer_us": round(eager["clean_seconds"] / layers * 1e6),
        "hook_us": each(eager), "captured_us": each(captured),
    }  # fmt: skip


def write(facts: dict[str, Any], out: Path) -> None:
    """The last results as JSON and as a page."""
    if {"copy", NOISE} <= facts["bandwidth"].keys() and set(ROOFLINE) <= facts["results"].get("qwen2-1.5b", {}).keys():
        facts["roofline"] = roofline(facts)
    (out / "gpu.json").write_text(json.dumps(facts, indent=2) + "\n")
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "triton"))
    lines = [
        "# Speed on a GPU\n",
        f"{facts['device']}, {versions}; medians of interleaved pairs, and their quartiles.\n",
        *_ratios(facts["results"]),
        *_scores(facts["results"]),
        *_bandwidths(facts["bandwidth"]),
    ]
    if facts.get("locate"):
        lines += ["\n| locate, device mode, 256 tokens | seconds | in forwards | verdict |", "|---|---|---|---|"]
        for name, row in facts["locate"].items():
            lines.append(f"| {name} | {row['seconds']:.2f} | {row['forwards']:.1f} | {row['verdict']} |")
    if facts.get("note"):
        lines.append(f"\n{facts['note']}")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")


def _ratios(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| model | case | clean | ratio | quartiles | target | pairs | measured |", "|---|---|---|---|---|---|---|---|"]
    for name, rows in results.items():
        for what, row in rows.items():
            target = TARGETS[name, what].text(row["ratio"]) if (name, what) in TARGETS else ""
            lines.append(
                f"| {name} | {what} | {row['clean_seconds'] * 1e3:.2f} ms | {row['ratio']:.3f} | {_quartiles(row)} | "
                f"{target} | {row['pairs']} | {row['date']} |"
            )
    return lines


def _scores(results: dict[str, dict[str, Any]]) -> list[str]:
    """What a score's row has no place for: the ratio of every process, and passes, which depend on what was written."""
    found = []
    for rows in results.values():
        for what, row in rows.items():
            if "each" in row:
                each = ", ".join(f"{ratio:.2f}" for ratio in row["each"])
                passes = f"{row['clean_passes']:g} passes clean, {row['faulty_passes']:g} faulty"
                found.append(f"\n{what}: {each}; {passes}; {row['weights']}.")
    return found


def _bandwidths(bandwidth: dict[str, dict[str, float]]) -> list[str]:
    copied = bandwidth.get("copy", {}).get("terabytes_per_second")
    if not copied:
        return []
    lines = [
        "\n8192 x 8960 values, bfloat16, one read and one write each; then by what really moves, where a tensor is read "
        "twice because a number of all of it comes first:\n",
        "| kernel | TB/s | of a copy | reads | by what moves |",
        "|---|---|---|---|---|",
    ]
    for name, row in bandwidth.items():
        share, reads = row["terabytes_per_second"] / copied, row.get("reads", 1)
        moves = share * (reads + 1) / 2
        lines.append(f"| {name} | {row['terabytes_per_second']:.2f} | {share:.0%} | {reads} | {moves:.0%} |")
    return lines


def _quartiles(row: dict[str, float]) -> str:
    return f"{row['low']:.2f}–{row['high']:.2f}" if "low" in row else ""


def earlier(out: Path, now: dict[str, str]) -> dict[str, Any]:
    """What was measured before on the same device and with the same versions; nothing else can stand beside new rows."""
    file = out / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    same = all(found.get(key) == value for key, value in now.items())
    return found if same else {**now, "bandwidth": {}, "results": {}, "locate": {}}

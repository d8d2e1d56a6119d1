"""What shaking costs on a CPU: ratios to the clean program in the same process, interleaved, medians.

SmolLM2-135M, float32, 4 x 128 tokens. Every case runs on a copy of the model, in turn with the clean original: clean,
case, clean, case, …; the ratio is the median over the pairs. Each case also proves that its error was there. Tools that
are not installed are left out of the table with a line that says so.

    make bench                 # installs the other tools beside ours, runs everything, writes speed.json and speed.md
    python benchmarks/speed.py --pairs 5 ours
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rivals
import shaketable as st
from shaketable.models import load_model

HERE = Path(__file__).parent
SCALE = 0.05
TARGETS = {
    "identity plan": 1.02,
    "relative_gaussian, 210 linears": 1.15,
    "relative_gaussian, op.matmul, forward + backward": 1.30,
}


@contextmanager
def shaken(model: Any, plan: str) -> Iterator[Any]:
    """A copy of the model under a plan. The operator mode is left to the forward pass, so that clean runs are clean."""
    copied = copy.deepcopy(model)
    injection = st.inject(copied, plan, seed=0, allow_inert=True).enable()
    injection.drop_mode()
    yield copied
    injection.close()


@contextmanager
def torchao_mxfp4(model: Any) -> Iterator[Any]:
    """MXFP4 on weights and inputs of every linear through torchao's own quantizer, as a fake-quantizing forward."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def quantize(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        coded = MXTensor.to_mx(flat, torch.float4_e2m1fn_x2, 32)
        return coded.dequantize(x.dtype).view(x.shape)

    copied = copy.deepcopy(model)
    for linear in rivals.decoder_linears(copied).values():

        def forward(x: torch.Tensor, linear: nn.Linear = linear) -> torch.Tensor:
            return nn.functional.linear(quantize(x), quantize(linear.weight), linear.bias)

        linear.forward = forward  # type: ignore[method-assign]
    yield copied


def forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """One forward pass."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def training(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach()  # type: ignore[no-any-return]


def ratio(clean: Any, case: Any, ids: torch.Tensor, run: Callable[..., torch.Tensor], pairs: int) -> dict[str, float]:
    """Median ratio over interleaved pairs, and how far the outputs are from the clean ones."""
    reference, outputs = run(clean, ids), run(case, ids)
    for _ in range(2):
        run(clean, ids), run(case, ids)
    rows = []
    for _ in range(pairs):
        start = time.perf_counter()
        run(clean, ids)
        middle = time.perf_counter()
        run(case, ids)
        rows.append((middle - start, time.perf_counter() - middle))
    ratios = sorted(b / a for a, b in rows)
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        "clean_seconds": statistics.median(a for a, _ in rows),
        "logits_moved": float((outputs - reference).norm() / reference.norm()),
    }


def cases(model: Any) -> dict[str, tuple[Any, Callable[..., torch.Tensor]]]:
    """Name to a context manager that makes the case, and what is run."""
    noisy = f"relative_gaussian:{SCALE}"
    found: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
        "identity plan": (shaken(model, "relative_gaussian:0@module.linear"), forward),
        "relative_gaussian, 210 linears": (shaken(model, f"{noisy}@module.linear"), forward),
        "relative_gaussian, op.matmul, forward": (shaken(model, f"{noisy}@op.matmul"), forward),
        "relative_gaussian, op.matmul, forward + backward": (shaken(model, f"{noisy}@op.matmul"), training),
        "mxfp4 W4A4, 210 linears": (shaken(model, "mxfp4@module.linear"), forward),
        "mxfp4 W4A4, training step": (shaken(model, "mxfp4@module.linear"), training),
    }
    for tool in ("naive", "mrfi", "pytorchfi", "aihwkit_lightning"):
        found[f"{tool}: gaussian, 210 linears"] = (getattr(rivals, tool)(model, SCALE), forward)
    found["torchao: mxfp4 W4A4, 210 linears"] = (torchao_mxfp4(model), forward)
    return found


def show(results: dict[str, dict[str, float]]) -> Table:
    """The table."""
    table = Table(title="Ratio to the clean program (SmolLM2-135M, 4 x 128 tokens, CPU)", title_justify="left")
    for name in ("case", "ratio", "quartiles", "target", "logits moved"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name, row in results.items():
        target = f"≤ {TARGETS[name]:.2f}" if name in TARGETS else ""
        spread = f"{row['low']:.2f}–{row['high']:.2f}"
        table.add_row(name, f"{row['ratio']:.3f}", spread, target, f"{row['logits_moved']:.1%}")
    return table


def write(results: dict[str, dict[str, float]], skipped: dict[str, str], pairs: int) -> None:
    """The last result, next to this file."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "pairs": pairs,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    (HERE / "speed.json").write_text(json.dumps(facts | {"results": results, "skipped": skipped}, indent=2) + "\n")
    lines = [
        f"# Speed on a CPU\n\n{', '.join(f'{k} {v}' for k, v in facts.items())}\n",
        "| case | ratio | quartiles | target |",
        "|---|---|---|---|",
    ]
    for name, row in results.items():
        target = f"≤ {TARGETS[name]:.2f}" if name in TARGETS else ""
        lines.append(f"| {name} | {row['ratio']:.3f} | {row['low']:.2f}–{row['high']:.2f} | {target} |")
    if {"mxfp4 W4A4, 210 linears", "torchao: mxfp4 W4A4, 210 linears"} <= set(results):
        factor = results["torchao: mxfp4 W4A4, 210 linears"]["ratio"] / results["mxfp4 W4A4, 210 linears"]["ratio"]
        lines.append(f"\nMXFP4 W4A4 is {factor:.1f} times as fast as the same through torchao (target: 2).")
    lines += [f"\nNot run: {name} ({why})." for name, why in skipped.items()]
    (HERE / "speed.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the cases whose names contain one of the words given, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases with one of these words in their name")
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    model, _ = load_model("smollm2-135m")
    torch.manual_seed(0)
    ids = torch.randint(0, 40000, (4, 128))
    results: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    console = Console()
    for name, (make, run) in cases(model).items():
        if arguments.words and not any(w in name for w in arguments.words):
            continue
        try:
            with make as case:
                results[name] = ratio(model, case, ids, run, arguments.pairs)
            console.print(f"{name}: {results[name]['ratio']:.3f}", style="dim")
        except ImportError as error:
            skipped[name] = str(error).splitlines()[0]
    console.print(show(results))
    for name, why in skipped.items():
        console.print(f"not run: {name}: {why}", style="yellow", markup=False)
    if not arguments.words:
        write(results, skipped, arguments.pairs)


if __name__ == "__main__":
    main()

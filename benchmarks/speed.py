"""What shaking costs on a CPU: ratios to the clean program in the same process, interleaved, medians.

SmolLM2-135M, float32, 4 x 128 tokens. Every case runs on a copy of the model, in turn with the clean original: clean,
case, clean, case, …; the ratio is the median over the pairs. Each case also proves that its error was there. Tools that
are not installed are left out of the table with a line that says so.

Then what a user waits for before that steady state: the first passes under a new plan, and ten passes with opening and closing
(`first_pass.py`); and a score of nano under a plan, as `shaketable sweep` takes it, in its own batch size.

    make bench                 # installs the other tools beside ours, runs everything, writes speed.json and speed.md
    python benchmarks/speed.py --pairs 6 'first pass' sweep      # only these; writes nothing unless --out says where
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
from first_pass import PASSES, Row, opened_rows, spread
from shaketable.evaluate.score import Condition, Evaluator, proof_of
from shaketable.evaluate.tasks import default_n, draw, load_task
from shaketable.models import load_model
from shaketable.plan import Plan
from targets import Target

HERE = Path(__file__).parent
SCALE = 0.05
NOISE = f"relative_gaussian:{SCALE}"
SWEEP = "sweep under op.matmul"
OPENED = {
    "210 linears": f"{NOISE}@module.linear",
    "op.matmul forward": f"{NOISE}@op.matmul",
    "mxfp4 W4A4": "mxfp4@module.linear",
}
"""The plans whose first passes are timed, under the names of their rows."""
TARGETS = {
    "identity plan": Target(1.02),
    "relative_gaussian, 210 linears": Target(1.10),
    "relative_gaussian, op.matmul, forward + backward": Target(1.20),
    "mxfp4 W4A4, 210 linears": Target(1.20),
    "first pass, 210 linears": Target(1.25),
    "second pass, 210 linears": Target(1.25),
    "ten passes with opening and closing, 210 linears": Target(1.15),
    SWEEP: Target(0.85, at_least=True),
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


def ratio(clean: Any, case: Any, ids: torch.Tensor, run: Callable[..., torch.Tensor], pairs: int) -> Row:
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
    return spread([b / a for a, b in rows]) | {
        "clean_seconds": statistics.median(a for a, _ in rows),
        "logits_moved": float((outputs - reference).norm() / reference.norm()),
    }


def cases(model: Any) -> dict[str, tuple[Any, Callable[..., torch.Tensor]]]:
    """Name to a context manager that makes the case, and what is run."""
    found: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
        "identity plan": (shaken(model, "relative_gaussian:0@module.linear"), forward),
        "relative_gaussian, 210 linears": (shaken(model, f"{NOISE}@module.linear"), forward),
        "relative_gaussian, op.matmul, forward": (shaken(model, f"{NOISE}@op.matmul"), forward),
        "relative_gaussian, op.matmul, forward + backward": (shaken(model, f"{NOISE}@op.matmul"), training),
        "mxfp4 W4A4, 210 linears": (shaken(model, "mxfp4@module.linear"), forward),
        "mxfp4 W4A4, training step": (shaken(model, "mxfp4@module.linear"), training),
    }
    for tool in ("naive", "mrfi", "pytorchfi", "aihwkit_lightning"):
        found[f"{tool}: gaussian, 210 linears"] = (getattr(rivals, tool)(model, SCALE), forward)
    found["torchao: mxfp4 W4A4, 210 linears"] = (torchao_mxfp4(model), forward)
    return found


def opened(model: Any, ids: torch.Tensor, what: str, rounds: int) -> dict[str, Row]:
    """The first passes under one of the plans, and ten with opening and closing."""
    rows = opened_rows(model, OPENED[what], lambda m: forward(m, ids), rounds)
    return {f"{name}, {what}": row for name, row in rows.items()}


def sweep(rounds: int) -> Row:
    """Problems per second of a sweep's score under a plan, over those of the clean score around it; nano on arithmetic.

    A score opens its plan and closes it, as in the command, and the batch size is the command's own. What a faulty model
    writes may be longer: `tokens_ratio` compares tokens per second.
    """
    model, tokenizer = load_model("nano")
    task = load_task("arithmetic")
    evaluator = Evaluator(model, tokenizer, task, draw(task, default_n(task), 0))
    score, clean = evaluator.score, Condition("clean")
    rows = []
    for seed in range(rounds + 1):  # the first round is for kernels and caches
        before = score(clean)
        faulty = score(Condition.of("faulty", Plan.parse(f"{NOISE}@op.matmul", seed=seed)))
        rows.append(((before.seconds + score(clean).seconds) / 2, before, faulty))
    rows = rows[1:]
    tokens = [seconds / f.seconds * f.tokens / c.tokens for seconds, c, f in rows]
    return spread([seconds / f.seconds for seconds, _, f in rows]) | {
        "clean_seconds": statistics.median(seconds for seconds, _, _ in rows),
        "tokens_ratio": statistics.median(tokens),
        "batch_size": evaluator.batch_size,
        "problems": before.n,
        "measured_error": statistics.median(proof_of(f.ledger)["measured_error"] for _, _, f in rows),
    }


def cells(name: str, row: Row) -> list[str]:
    """The cells of a row, for both tables."""
    target = TARGETS[name].text(row["ratio"]) if name in TARGETS else ""
    proof = f"products by {row['measured_error']:.1%}" if name == SWEEP else f"logits by {row['logits_moved']:.1%}"
    return [name, f"{row['ratio']:.3f}", f"{row['low']:.2f}–{row['high']:.2f}", target, proof]


def show(results: dict[str, Row]) -> Table:
    """The table."""
    table = Table(title="Ratio to the clean program (SmolLM2-135M, 4 x 128 tokens, CPU)", title_justify="left")
    for name in ("case", "ratio", "quartiles", "target", "moved"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name, row in results.items():
        table.add_row(*cells(name, row))
    return table


def write(results: dict[str, Row], skipped: dict[str, str], pairs: int, out: Path) -> None:
    """The last result, as JSON and as a page."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "pairs": pairs,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    (out / "speed.json").write_text(json.dumps(facts | {"results": results, "skipped": skipped}, indent=2) + "\n")
    lines = [
        f"# Speed on a CPU\n\n{', '.join(f'{k} {v}' for k, v in facts.items())}\n",
        "| case | ratio | quartiles | target | moved |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(cells(name, row))} |" for name, row in results.items()),
    ]
    if {"mxfp4 W4A4, 210 linears", "torchao: mxfp4 W4A4, 210 linears"} <= set(results):
        factor = results["torchao: mxfp4 W4A4, 210 linears"]["ratio"] / results["mxfp4 W4A4, 210 linears"]["ratio"]
        lines.append(f"\nMXFP4 W4A4 is {factor:.1f} times as fast as the same through torchao (target: 2).")
    if SWEEP in results:
        row = results[SWEEP]
        how = f"{row['problems']} problems in batches of {row['batch_size']}, opening and closing included"
        lines.append(f"\n{SWEEP}: problems per second over those of the clean score; nano on arithmetic, {how}.")
    lines += [f"\nNot run: {name} ({why})." for name, why in skipped.items()]
    (out / "speed.md").write_text("\n".join(lines) + "\n")


def measured(wanted: Callable[[str], bool], pairs: int, tell: Callable[[str], None]) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows of all cases that are wanted, and why some were not run."""
    model, _ = load_model("smollm2-135m")
    torch.manual_seed(0)
    ids = torch.randint(0, 40000, (4, 128))
    results: dict[str, Row] = {}
    skipped: dict[str, str] = {}

    def note(rows: dict[str, Row]) -> None:
        results.update(rows)
        for name, row in rows.items():
            tell(f"{name}: {row['ratio']:.3f}")

    for name, (make, run) in cases(model).items():
        if wanted(name):
            try:
                with make as case:
                    note({name: ratio(model, case, ids, run, pairs)})
            except ImportError as error:
                skipped[name] = str(error).splitlines()[0]
    for what in OPENED:
        if any(wanted(f"{name}, {what}") for name in PASSES):
            note(opened(model, ids, what, max(1, pairs // 3)))
    if wanted(SWEEP):
        note({SWEEP: sweep(pairs)})
    return results, skipped


def main() -> None:
    """Run the cases whose names contain one of the words given, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases with one of these words in their name")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, help="cores; all by default. A machine that others use needs 1 for steady numbers"
    )
    parser.add_argument("--out", type=Path, help="folder for speed.json and speed.md; beside this file when all cases run")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console, words = Console(), arguments.words
    results, skipped = measured(
        lambda name: not words or any(w in name for w in words), arguments.pairs, lambda line: console.print(line, style="dim")
    )
    console.print(show(results))
    for name, why in skipped.items():
        console.print(f"not run: {name}: {why}", style="yellow", markup=False)
    out = arguments.out or (None if words else HERE)
    if out is not None:
        write(results, skipped, arguments.pairs, out)


if __name__ == "__main__":
    main()

"""What shaking costs at scale: the tables of docs/scale.md, from the shapes of models and a file of measured numbers.

    python scripts/roofline.py                                  # benchmarks/gpu.json and scale.json; writes docs/scale.md
    python scripts/roofline.py --print [--measured FILE] [--price 2.5] [--prompt 128] [--response 256]

Four tables between markers. `shapes` and `memory` need nothing but shapes. `costs` needs what was measured on a GPU: the
object "roofline" of benchmarks/gpu.json, whose fields `GPU` names; without it the page says that it was not computed.
`simulated` repeats benchmarks/scale.json.

The model of time is two roofs: a pass takes what the GPU needs or what Python needs to start its kernels, whichever is longer.
A fault adds to both sides, and only what sticks out above the longer one is paid for. docs/scale.md writes the formulas out.

Rejected: fitting the overhead to a few measured ratios. Ratios do not carry over to another model; bytes, launches and FLOPs
do. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import training_memory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale.md"
MEASURED, SCALE = ROOT / "benchmarks" / "gpu.json", ROOT / "benchmarks" / "scale.json"
TWO_BYTES = 2
LINEARS, FUSED_LINEARS = 7, 4
"""Of a layer: in Transformers; in vLLM, where q, k and v are one, and gate and up."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    """Whether the head is the embedding."""

    @property
    def kv(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of the linears of one layer."""
        return 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.inner

    @property
    def weights(self) -> int:
        """All weights that a token is multiplied with, the head among them."""
        return self.layers * self.layer_weights + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """The same, and the embedding; without biases and norms, which are less than a thousandth."""
        return self.weights + (0 if self.tied else self.hidden * self.vocabulary)

    @property
    def hit(self) -> int:
        """Values per token that a fault on the outputs of all linears changes: q, o, down; k, v; gate, up."""
        return self.layers * (3 * self.hidden + 2 * self.kv + 2 * self.inner)

    @property
    def gradients(self) -> int:
        """Values per token of the gradients with respect to the inputs of all linears."""
        return self.layers * (6 * self.hidden + self.inner)

    @property
    def sites(self) -> int:
        """Linears."""
        return LINEARS * self.layers

    def hit_by_rank(self, ranks: int) -> float:
        """The same as `hit` on one of several tensor-parallel ranks: o and down are whole on each."""
        return self.layers * ((self.hidden + 2 * self.kv + 2 * self.inner) / ranks + 2 * self.hidden)


@dataclass(frozen=True)
class Gpu:
    """What was measured on one GPU, and the two numbers that its maker states."""

    device: str
    peak_tflops: float
    """Dense bfloat16 products, as the maker states."""
    copy_gb_s: float
    """Bytes read and written by a copy, per second."""
    kernel_gb_s: float
    """The same for relative_gaussian, in place, bfloat16."""
    mfu: float
    """Share of the peak that the clean 1.5B forward reaches."""
    layer_us: float
    """Python's time for one clean decoder layer, eager, forward."""
    hook_us: float
    """Python's time for one hit, eager."""
    captured_us: float
    """The GPU's time for one hit on next to nothing, inside of a CUDA graph."""


@dataclass(frozen=True)
class Run:
    """One training of the origin, in the lengths that are assumed where the origin does not say."""

    model: Model
    prompts: int
    steps: int
    samples: int = 5
    gpus: int = 8
    micro_batch: int = 4
    prompt: int = 128
    response: int = 256

    @property
    def sequences(self) -> int:
        """Of one step, on one GPU."""
        return self.prompts * self.samples // self.gpus


MODELS = {
    "1.5B": Model("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151_936, tied=True),
    "7B": Model("Qwen2.5-7B", 3584, 18_944, 28, 28, 4, 152_064),
    "70B": Model("Llama-3-70B", 8192, 28_672, 80, 64, 8, 128_256),
}
RUNS = (Run(MODELS["1.5B"], 128, 116), Run(MODELS["7B"], 64, 232))
PLANS = {
    "clean": (False, None),
    "outputs of all linears, sampler": (True, None),
    "outputs of all linears, trainer": (False, "module"),
    "outputs of all linears, both": (True, "module"),
    "every product, forward and backward, both": (True, "op"),
}
"""Whether the sampler is shaken, and at which level the trainer is."""


@dataclass(frozen=True)
class Shake:
    """What faults add to one pass."""

    per_token: float = 0
    """Values changed for each token."""
    per_pass: float = 0
    """Values changed whatever the number of tokens: gradients of weights."""
    fires: float = 0


def outputs(model: Model, linears: int = LINEARS) -> Shake:
    """The outputs of all linears; relative noise changes as many values again in the gradient."""
    return Shake(model.hit, 0, linears * model.layers)


def products_backward(model: Model) -> Shake:
    """The products of a backward: the gradients of inputs and of weights."""
    return Shake(model.gradients, model.layers * model.layer_weights, 2 * model.sites)


def seconds(model: Model, gpu: Gpu, tokens: float, shake: Shake, *, forwards: int = 1, captured: bool = False) -> float:
    """Of one pass over `tokens` that is `forwards` times the work of a forward: what the GPU needs, or what Python needs."""
    work = 2 * model.weights * tokens / (gpu.mfu * gpu.peak_tflops * 1e12)
    device = forwards * max(work, model.weights * TWO_BYTES / (gpu.copy_gb_s * 1e9))
    device += 2 * TWO_BYTES * (shake.per_token * tokens + shake.per_pass) / (gpu.kernel_gb_s * 1e9)
    if captured:
        return device + shake.fires * gpu.captured_us * 1e-6
    return max(device, (forwards * model.layers * gpu.layer_us + shake.fires * gpu.hook_us) * 1e-6)


def rollout(run: Run, gpu: Gpu, shaken: bool) -> float:
    """Seconds of sampling: the prompts are read, then one pass per token, captured, with the cache read in each."""
    shake = outputs(run.model, FUSED_LINEARS) if shaken else Shake()
    cache = 2 * TWO_BYTES * run.model.layers * run.model.kv * run.sequences * (run.prompt + run.response / 2)
    read = seconds(run.model, gpu, run.sequences * run.prompt, shake)
    token = seconds(run.model, gpu, run.sequences, shake, captured=True) + cache / (gpu.copy_gb_s * 1e9)
    return read + run.response * token


def train(run: Run, gpu: Gpu, level: str | None) -> float:
    """Seconds of learning: log-probabilities of reference and policy, then forward, forward again and backward."""
    model, tokens = run.model, run.micro_batch * (run.prompt + run.response)
    back = {None: Shake(), "module": outputs(model), "op": products_backward(model)}[level]
    forward = seconds(model, gpu, tokens, outputs(model) if level else Shake())
    reference, backward = seconds(model, gpu, tokens, Shake()), seconds(model, gpu, tokens, back, forwards=2)
    return -(-run.sequences // run.micro_batch) * (reference + 3 * forward + backward)


def costs(run: Run, gpu: Gpu, price: float) -> list[list[str]]:
    """The rows of a run."""
    spent = {name: (rollout(run, gpu, sampler), train(run, gpu, level)) for name, (sampler, level) in PLANS.items()}
    return [_row(run, name, parts, spent["clean"], price) for name, parts in spent.items()]


def _row(run: Run, name: str, spent: tuple[float, float], clean: tuple[float, float], price: float) -> list[str]:
    step, ratio = sum(spent), sum(spent) / sum(clean)
    bill = step * run.steps / 3600 * run.gpus * price
    extra = (step - sum(clean)) * run.steps / 3600 * run.gpus * price
    money = [f"{bill:.2f}", f"{extra:.2f}"]
    return [run.model.name, name, f"{spent[0]:.2f}", f"{spent[1]:.2f}", f"{ratio:.3f}", f"{step * run.steps / 60:.1f}", *money]


# ---- the tables


def shapes() -> str:
    """What follows from shapes alone."""
    head = ["model", "weights, G", "linears", "values hit per token", "bytes per token", "values of gradients per token"]
    rows = []
    for model in MODELS.values():
        size = [f"{model.weights / 1e9:.2f}", str(model.sites), f"{model.hit:,}", f"{2 * TWO_BYTES * model.hit:,}"]
        rows.append([model.name, *size, f"{model.gradients:,}"])
    big = MODELS["70B"]
    ranks = [[f"{n}", f"{big.hit_by_rank(n):,.0f}", f"{big.hit_by_rank(n) * n / big.hit:.2f}"] for n in (1, 2, 4, 8)]
    split = _table(["tensor-parallel ranks", "values per token and rank", "all ranks together, against one"], ranks)
    return _table(head, rows) + f"\n\n{big.name}, split:\n\n" + split


def memory(run: Run) -> str:
    """What the largest of the origin's models needs."""
    tokens = run.micro_batch * (run.prompt + run.response)
    about = f"{run.model.name}, {run.model.parameters / 1e9:.2f} G parameters, micro-batches of {tokens:,} tokens."
    return f"{about}\n\n{_table(training_memory.HEAD, training_memory.rows(run.model, tokens))}"


def overhead(gpu: Gpu, runs: tuple[Run, ...], price: float) -> str:
    """What a GPU's numbers say of the origin's runs."""
    head = ["model", "plan", "sampling, s a step", "learning, s a step", "ratio", "minutes", "bill, $", "of it shaking, $"]
    rows = [row for run in runs for row in costs(run, gpu, price)]
    about = f"{gpu.device}: copy {gpu.copy_gb_s:,.0f} GB/s, kernel {gpu.kernel_gb_s:,.0f} GB/s, {gpu.mfu:.0%} of "
    about += f"{gpu.peak_tflops:,.0f} TFLOP/s, {gpu.layer_us:g} µs a layer and {gpu.hook_us:g} µs a fire in Python, "
    run = runs[0]
    about += f"{gpu.captured_us:g} µs captured. {run.prompt} + {run.response} tokens, ${price:g} per GPU and hour."
    return f"{about}\n\n{_table(head, rows)}"


def simulated(found: dict[str, Any]) -> str:
    """What benchmarks/scale.py measured."""
    bytes_each = next(iter(found["volume"].values()))["bytes"]
    head = ["processes", "files, MB", "merged at the end, s", "reports read after a step, s", "error of a step, s"]
    rows = []
    for row in found["merging"]:
        cells = [f"{row['megabytes']:.1f}", f"{row['collect']:.2f}", f"{row['read']:.2f}", f"{row['span_error']:.2f}"]
        rows.append([f"{row['processes']:,}", *cells])
    return f"A ledger of 196 linears, both directions, two phases: {bytes_each:,} bytes.\n\n{_table(head, rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


# ---- reading and writing


def read_gpu(path: Path) -> Gpu | None:
    """The measured numbers; None when nothing was measured, an error when something is missing."""
    body = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "roofline" not in body:
        return None
    known = [field.name for field in fields(Gpu)]
    if missing := [name for name in known if name not in body["roofline"]]:
        sys.exit(f'{path.name}: "roofline" has no {", ".join(missing)}')
    return Gpu(**{name: body["roofline"][name] for name in known})


def tables(asked: argparse.Namespace) -> dict[str, str]:
    """All tables by the name of their markers."""
    gpu = read_gpu(asked.measured)
    runs = tuple(replace(run, prompt=asked.prompt, response=asked.response) for run in RUNS)
    found = json.loads(SCALE.read_text(encoding="utf-8")) if SCALE.exists() else None
    none = f'Not computed: {asked.measured.name} has no "roofline" yet.'
    return {
        "shapes": shapes(),
        "memory": memory(runs[-1]),
        "costs": none if gpu is None else overhead(gpu, runs, asked.price),
        "simulated": "Not run." if found is None else simulated(found),
    }


def fill(text: str, name: str, table: str) -> str:
    """The page with one table between its markers."""
    begin, end = f"<!-- {name}: scripts/roofline.py -->", f"<!-- end of {name} -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    """Compute, and write the page or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED, help='a JSON file with an object "roofline"')
    parser.add_argument("--price", type=float, default=2.5, help="dollars per GPU and hour")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of an answer, on average")
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    asked = parser.parse_args()
    found = tables(asked)
    if asked.print:
        print("\n\n".join(found.values()))
        return
    text = PAGE.read_text(encoding="utf-8")
    for name, table in found.items():
        text = fill(text, name, table)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What shaking costs on a card: ratios to the clean program in the same process, interleaved, medians.

Two shapes with random weights, bfloat16: SmolLM2-135M, which waits for Python, and Qwen2-1.5B, which waits for memory. Prefill
of 8 x 1024 tokens, one decoded token for 64 rows, one training step; eager, compiled, captured. Each case proves that its
error was there. Beside it stands the naive hook, `y + y.abs() * torch.randn_like(y) * scale`, which nobody can prove anything
about. Then the bandwidth of every kernel beside that of a copy, and the cost of AQN and of locate.

    python benchmarks/gpu.py                         # everything; writes gpu.json and gpu.md
    python benchmarks/gpu.py --only smollm2 eager    # cases with all of these words in their name; the others stay as they were

Every case is written down as soon as it is measured, with its date: a run that is cut off has lost nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

import shaketable as st
from shaketable.faults import Draw, make_fault
from shaketable.harden.aqn import AQN
from shaketable.measure.generation import Decoder
from shaketable.measure.static_decoding import StaticDecoding

HERE = Path(__file__).parent
SCALE = 0.05
NOISE = f"relative_gaussian:{SCALE}"
SHAPES: dict[str, tuple[Any, Any]] = {
    "smollm2-135m": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            vocab_size=49152, tie_word_embeddings=True,
        ),
    ),
    "qwen2-1.5b": (
        Qwen2ForCausalLM,
        Qwen2Config(
            hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
            vocab_size=151936, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
TARGETS = {
    ("smollm2-135m", "prefill eager, relative_gaussian on all linears"): 1.15,
    ("qwen2-1.5b", "prefill eager, relative_gaussian on all linears"): 1.20,
    ("smollm2-135m", "prefill compiled, relative_gaussian on all linears"): 1.12,
    ("qwen2-1.5b", "prefill compiled, relative_gaussian on all linears"): 1.12,
    ("smollm2-135m", "training step eager, op.matmul forward + backward"): 1.20,
    ("qwen2-1.5b", "training step eager, op.matmul forward + backward"): 1.20,
    ("smollm2-135m", "prefill eager, mxfp4 W4A4"): 1.6,
    ("qwen2-1.5b", "prefill eager, mxfp4 W4A4"): 1.6,
    ("smollm2-135m", "rollout eager, AQN on all norms"): 1.01,
    ("qwen2-1.5b", "rollout eager, AQN on all norms"): 1.01,
    ("smollm2-135m", "rollout replayed, AQN on all norms"): 1.01,
    ("qwen2-1.5b", "rollout replayed, AQN on all norms"): 1.01,
}
PEAK = 989.0
"""Dense bfloat16 of an H100 or H200, TFLOP/s, by its data sheet."""
Run = Callable[[], Any]
Words = tuple[list[str], list[str]]
"""What a case's name must have, and what it must not have."""


def linears(model: Any) -> list[nn.Linear]:
    """All linears of the layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]


def timed(clean: Run, case: Run, pairs: int) -> dict[str, float]:
    """Median ratio over interleaved pairs of seconds, each waited for."""
    for _ in range(3):
        clean(), case()
    rows = []
    for _ in range(pairs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        clean()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        case()
        torch.cuda.synchronize()
        rows.append((middle - start, time.perf_counter() - middle))
    ratios = sorted(b / a for a, b in rows)
    quarter = len(ratios) // 4
    seconds = statistics.median(a for a, _ in rows)
    return {"ratio": statistics.median(ratios), "low": ratios[quarter], "high": ratios[-1 - quarter], "clean_seconds": seconds}


@contextmanager
def shaken(model: Any, plan: str) -> Iterator[tuple[Any, Any]]:
    """A copy under a plan, and its injection."""
    copied = copy.deepcopy(model)
    injection = st.inject(copied, plan, seed=0, allow_inert=True).enable()
    injection.drop_mode()
    yield copied, injection
    injection.close()


@contextmanager
def naive(model: Any, _: str) -> Iterator[tuple[Any, None]]:
    """A copy with the hook that everybody writes first."""
    copied = copy.deepcopy(model)
    for linear in linears(copied):
        linear.register_forward_hook(lambda module, args, y: y + y.abs() * torch.randn_like(y) * SCALE)
    yield copied, None


class Bench:
    """The cases of one shape."""

    def __init__(self, name: str, pairs: int, note: Callable[[str, str, dict[str, Any]], None]) -> None:
        """`note` is told every row: the shape, the case, what was measured."""
        kind, config = SHAPES[name]
        self.name, self.pairs, self.note = name, pairs, note
        with torch.device("cuda"):
            torch.manual_seed(0)
            torch.set_default_dtype(torch.bfloat16)
            self.model = kind._from_config(config).eval()
            torch.set_default_dtype(torch.float32)
            self.ids = torch.randint(0, config.vocab_size, (8, 1024))
            self.token = torch.randint(0, config.vocab_size, (64, 1))

    # ---- what is run

    def prefill(self, model: Any, compiled: str = "") -> Run:
        """One forward of the prompt; `compiled` is a mode of torch.compile."""
        call = torch.compile(model, dynamic=False, mode=compiled) if compiled else model

        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                return call(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits

        return run

    def decode(self, model: Any, captured: bool = False) -> Run:
        """One token for 64 rows, 128 tokens into a static cache."""
        cache = StaticCache(model.config, max_cache_len=256)
        place = torch.tensor([128], device="cuda")
        rows = torch.full((64, 1), 128, device="cuda")

        def run() -> Any:
            with torch.no_grad():
                return model(
                    input_ids=self.token, past_key_values=cache, cache_position=place, position_ids=rows, use_cache=True
                ).logits

        return _captured(run) if captured else run

    def train(self, model: Any, captured: bool = False) -> Run:
        """One forward and backward; the loss in chunks is not what is measured here."""

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model.model(input_ids=self.ids, use_cache=False).last_hidden_state.float().square().mean().backward()

        return _captured(run) if captured else run

    def rollout(self, model: Any) -> Run:
        """A prompt and 32 tokens for 64 rows."""

        def run() -> Any:
            with torch.no_grad(), st.phase("rollout"):
                return model.generate(self.token.expand(64, 32), max_new_tokens=32, do_sample=False, pad_token_id=0)

        return run

    def replayed(self, model: Any) -> Run:
        """The same as `shaketable train` does it: 64 prompts of 32 tokens, 32 more, in a captured graph."""
        static, prompts = StaticDecoding(Decoder(32, (), 0)), self.token.expand(64, 32).tolist()

        def run() -> Any:
            with st.phase("rollout"):
                return static.decode(model, prompts)

        return run

    # ---- the cases

    def wants(self, what: str, only: Words) -> bool:
        """Whether a case is asked for."""
        there, absent = only
        name = f"{self.name} {what}"
        return all(word in name for word in there) and not any(word in name for word in absent)

    def case(self, what: str, plan: str, make: Any, only: Words, how: str = "shaken") -> None:
        """Measure one case beside the clean program."""
        if not self.wants(what, only):
            return
        torch._dynamo.reset()
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # or the clean graph is taken for a model with hooks
        with (naive if how == "naive" else shaken)(self.model, plan) as (model, injection):
            row = timed(make(self.model), make(model), self.pairs)
            if injection is not None and plan[-4:] != "none":
                row["fires"] = injection.ledger.forward + injection.ledger.backward
                row["magnitude"] = injection.ledger.sites[0].magnitude or 0.0
                row["changed"] = injection.ledger.changed
        self.note(self.name, what, row)

    def all(self, only: Words) -> None:
        """Every case."""
        linear = f"{NOISE}@module.linear"
        self.case("prefill eager, identity plan", "relative_gaussian:0@module.linear", self.prefill, only)
        self.case("prefill eager, relative_gaussian on all linears", linear, self.prefill, only)
        self.case("prefill eager, naive hook", "", self.prefill, only, "naive")
        self.case("prefill eager, op.matmul", f"{NOISE}@op.matmul", self.prefill, only)
        self.case("prefill eager, mxfp4 W4A4", "mxfp4@module.linear", self.prefill, only)
        self.case("decode eager, relative_gaussian on all linears", linear, self.decode, only)
        self.case("decode eager, naive hook", "", self.decode, only, "naive")
        self.case("decode captured, relative_gaussian on all linears", linear, lambda m: self.decode(m, True), only)
        self.case("decode captured, naive hook", "", lambda m: self.decode(m, True), only, "naive")
        self.case("training step eager, relative_gaussian on all linears", linear, self.train, only)
        self.case("training step eager, op.matmul forward + backward", f"{NOISE}@op.matmul", self.train, only)
        self.case("training step eager, naive hook", "", self.train, only, "naive")
        captured = partial(self.train, captured=True)
        self.case("training step captured, op.matmul forward + backward", f"{NOISE}@op.matmul", captured, only)
        self.case("training step captured, naive hook", "", captured, only, "naive")
        self.aqn("rollout eager, AQN on all norms", self.rollout, only)
        self.aqn("rollout replayed, AQN on all norms", self.replayed, only)
        for what, mode in (("prefill compiled", "default"), ("prefill compiled and captured", "reduce-overhead")):
            self.case(f"{what}, relative_gaussian on all linears", linear, lambda m, mode=mode: self.prefill(m, mode), only)
            self.case(f"{what}, naive hook", "", lambda m, mode=mode: self.prefill(m, mode), only, "naive")

    def aqn(self, what: str, rollout: Callable[[Any], Run], only: Words) -> None:
        """A rollout with noise on the weights of the norms, another one at every rollout."""
        if not self.wants(what, only):
            return
        copied = copy.deepcopy(self.model)
        with AQN.load("constant:0.01").attach(copied, 10**6) as attached:
            noisy = rollout(copied)

            def step() -> None:
                attached.step += 1
                noisy()

            row = timed(rollout(self.model), step, self.pairs)
            row["fires"] = attached.ledger.forward
        self.note(self.name, what, row)


def _captured(run: Run) -> Run:
    """Replays of what a function does."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        assert run  # what the graph reads lives as long as this
        graph.replay()

    return replay


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


def _rate(run: Run, moved: int, pairs: int) -> dict[str, float]:
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


def locating() -> dict[str, dict[str, Any]]:
    """Seconds of locate in device mode on 256 tokens, healthy and with a fault in layer 15, and the same in forwards."""
    found = {}
    for name, (kind, config) in SHAPES.items():
        with torch.device("cuda"):
            torch.manual_seed(0)
            model = kind._from_config(config, dtype=torch.bfloat16).eval()
            ids = torch.randint(0, config.vocab_size, (1, 256))
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


def roofline(facts: dict[str, Any]) -> dict[str, Any]:
    """What docs/scale.md is computed from: the 1.5B shape's share of the peak, and microseconds per layer and per strike."""
    rows, (_, config) = facts["results"]["qwen2-1.5b"], SHAPES["qwen2-1.5b"]
    inner, keys = config.intermediate_size, config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * config.hidden_size * (config.hidden_size + keys) + 3 * config.hidden_size * inner
    work = 2 * config.num_hidden_layers * layer * 8 * 1024
    strikes = 7 * config.num_hidden_layers
    eager, captured = (rows[f"decode {how}, relative_gaussian on all linears"] for how in ("eager", "captured"))
    prefill = rows["prefill eager, relative_gaussian on all linears"]["clean_seconds"]

    def each(row: dict[str, float]) -> float:
        return round((row["ratio"] - 1) * row["clean_seconds"] / strikes * 1e6, 1)

    return {
        "device": facts["device"], "peak_tflops": PEAK, "mfu": round(work / prefill / PEAK / 1e12, 2),
        "copy_gb_s": round(facts["bandwidth"]["copy"]["terabytes_per_second"] * 1e3),
        "kernel_gb_s": round(facts["bandwidth"][NOISE]["terabytes_per_second"] * 1e3),
        "layer_us": round(eager["clean_seconds"] / config.num_hidden_layers * 1e6),
        "hook_us": each(eager), "captured_us": each(captured),
    }  # fmt: skip


def write(facts: dict[str, Any], out: Path) -> None:
    """The last results as JSON and as a page."""
    if all("decode captured, relative_gaussian on all linears" in rows for rows in facts["results"].values()):
        facts["roofline"] = roofline(facts)
    (out / "gpu.json").write_text(json.dumps(facts, indent=2) + "\n")
    lines = [
        "# Speed on a card\n",
        f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}, triton {facts['triton']}; "
        "medians of interleaved pairs, and their quartiles.\n",
        "| model | case | clean | ratio | quartiles | target | pairs | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in facts["results"].items():
        for what, row in rows.items():
            target = TARGETS.get((name, what))
            lines.append(
                f"| {name} | {what} | {row['clean_seconds'] * 1e3:.2f} ms | {row['ratio']:.3f} | {_quartiles(row)} | "
                f"{f'≤ {target:.2f}' if target else ''} | {row['pairs']} | {row['date']} |"
            )
    copied = facts["bandwidth"].get("copy", {}).get("terabytes_per_second")
    if copied:
        lines += [
            "\n8192 x 8960 values, bfloat16, one read and one write each; then by what really moves, where a tensor is read "
            "twice because a number of all of it comes first:\n",
            "| kernel | TB/s | of a copy | reads | by what moves |",
            "|---|---|---|---|---|",
        ]
        for name, row in facts["bandwidth"].items():
            share, reads = row["terabytes_per_second"] / copied, row.get("reads", 1)
            moves = share * (reads + 1) / 2
            lines.append(f"| {name} | {row['terabytes_per_second']:.2f} | {share:.0%} | {reads} | {moves:.0%} |")
    if facts.get("locate"):
        lines += ["\n| locate, device mode, 256 tokens | seconds | in forwards | verdict |", "|---|---|---|---|"]
        for name, row in facts["locate"].items():
            lines.append(f"| {name} | {row['seconds']:.2f} | {row['forwards']:.1f} | {row['verdict']} |")
    if facts.get("note"):
        lines.append(f"\n{facts['note']}")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")


def _quartiles(row: dict[str, float]) -> str:
    return f"{row['low']:.2f}–{row['high']:.2f}" if "low" in row else ""


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must have")
    parser.add_argument("--without", nargs="*", default=[], help="words that it must not have")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--skip", nargs="*", default=[], choices=["models", "bandwidth", "locate"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; benchmarks/speed.py is for CPUs")
    now = {"device": torch.cuda.get_device_name()} | {name: version(name) for name in ("torch", "transformers", "triton")}
    facts = earlier(arguments.out, now)

    def note(name: str, what: str, row: dict[str, Any]) -> None:
        facts["results"].setdefault(name, {})[what] = row | {"date": time.strftime("%Y-%m-%d"), "pairs": arguments.pairs}
        print(f"{name} {what}: {row['ratio']:.3f} ({row['clean_seconds'] * 1e3:.2f} ms clean)", flush=True)
        write(facts, arguments.out)

    if "bandwidth" not in arguments.skip:
        facts["bandwidth"] = bandwidth(arguments.pairs)
        for name, row in facts["bandwidth"].items():
            print(f"{name}: {row['terabytes_per_second']:.2f} TB/s", flush=True)
    for name in SHAPES if "models" not in arguments.skip else ():
        Bench(name, arguments.pairs, note).all((arguments.only, arguments.without))
        torch.cuda.empty_cache()
    if "locate" not in arguments.skip:
        facts["locate"] = locating()
    write(facts, arguments.out)


def earlier(out: Path, now: dict[str, str]) -> dict[str, Any]:
    """What was measured before on the same device and with the same versions; nothing else can stand beside new rows."""
    file = out / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    same = all(found.get(key) == value for key, value in now.items())
    return found if same else {**now, "bandwidth": {}, "results": {}, "locate": {}}


if __name__ == "__main__":
    main()

"""What shaking costs on a GPU: ratios to the clean program in the same process, interleaved, medians.

Two shapes with random weights, bfloat16: SmolLM2-135M, which waits for Python, and Qwen2-1.5B, which waits for memory. Prefill
of 8 x 1024 tokens, one decoded token for 64 rows, one training step; eager, compiled, captured. Each case proves that its
error was there. Beside it stands the naive hook, `y + y.abs() * torch.randn_like(y) * scale`, which nobody can prove anything
about. What a user waits for: the first passes under a new plan and ten with opening and closing (`first_pass.py`), and a score
of 256 problems, alone and with four processes side by side (`gpu_score.py`). Then the bandwidth of every kernel beside that of
a copy, and the cost of AQN and of locate.

    python benchmarks/gpu.py                                       # everything; writes gpu.json and gpu.md
    python benchmarks/gpu.py --only 'first pass,score'             # cases with these words; the others stay as they were
    python benchmarks/gpu.py --only 'qwen2 compiled' --without captured
    python benchmarks/gpu.py --list                                # the names of all cases, or of those --only asks for
    python benchmarks/gpu.py --smoke --only first --out /tmp       # tiny models on a CPU: does it run?

Every case is written down as soon as it is measured, with its date: a run that is cut off has lost nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

import shaketable as st
from choice import Choice
from first_pass import Row, opened_rows, spread
from gpu_bandwidth import bandwidth
from gpu_locate import locating
from gpu_models import NOISE, SHAPES, build, naive, shaken
from gpu_page import LINEARS, earlier, write
from gpu_score import PROBLEMS, side_by_side
from shaketable.aqn.spec import AQN

HERE = Path(__file__).parent
BANDWIDTH, LOCATE = "bandwidth of every kernel", "locate in device mode"
Run = Callable[[], Any]
Case = Callable[[], dict[str, Row]]
"""Measures, and returns its rows by their names."""


class Bench:
    """The cases of one shape."""

    def __init__(self, name: str, pairs: int, smoke: bool = False) -> None:
        """The model is built when the first case needs it; `smoke` takes a tiny one on a CPU."""
        self.name, self.pairs, self.smoke = name, pairs, smoke
        self.device = "cpu" if smoke else "cuda"

    @cached_property
    def model(self) -> Any:
        """The clean one."""
        return build(self.name, self.device, torch.bfloat16, small=self.smoke)

    @cached_property
    def ids(self) -> torch.Tensor:
        """The prompt."""
        return torch.randint(0, self.model.config.vocab_size, (2, 16) if self.smoke else (8, 1024), device=self.device)

    @cached_property
    def token(self) -> torch.Tensor:
        """One token for each of 64 rows."""
        return torch.randint(0, self.model.config.vocab_size, (64, 1), device=self.device)

    def wait(self) -> None:
        """For the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

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
        place = torch.tensor([128], device=self.device)
        rows = torch.full((64, 1), 128, device=self.device)

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

    # ---- how it is measured

    def timed(self, clean: Run, case: Run) -> Row:
        """Median ratio over interleaved pairs of seconds, each waited for."""
        for _ in range(3):
            clean(), case()
        rows = []
        for _ in range(self.pairs):
            self.wait()
            start = time.perf_counter()
            clean()
            self.wait()
            middle = time.perf_counter()
            case()
            self.wait()
            rows.append((middle - start, time.perf_counter() - middle))
        return spread([b / a for a, b in rows]) | {"clean_seconds": statistics.median(a for a, _ in rows)}

    def beside_clean(self, what: str, plan: str, make: Callable[[Any], Run], how: Any = shaken) -> dict[str, Row]:
        """One case beside the clean program."""
        torch._dynamo.reset()
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # or the clean graph is taken for a model with hooks
        with how(self.model, plan) as (model, injection):
            row = self.timed(make(self.model), make(model))
            if injection is not None:
                row["fires"] = injection.ledger.forward + injection.ledger.backward
                row["magnitude"] = injection.ledger.sites[0].magnitude or 0.0
                row["changed"] = injection.ledger.changed
        return {what: row}

    def opened(self, what: str, plan: str) -> dict[str, Row]:
        """The first passes under a plan, and ten with opening and closing, eager."""
        rounds = max(1, self.pairs // 2)
        rows = opened_rows(self.model, plan, lambda model: self.prefill(model)(), rounds, self.wait)
        return {f"{name} eager, {what}": row | {"pairs": rounds} for name, row in rows.items()}

    def aqn(self, what: str, rollout: Callable[[Any], Run]) -> dict[str, Row]:
        """A rollout with noise on the weights of the norms, another one at every rollout."""
        copied = copy.deepcopy(self.model)
        with AQN.load("constant:0.01").attach(copied, 10**6) as attached:
            noisy = rollout(copied)

            def step() -> None:
                attached.step += 1
                noisy()

            row = self.timed(rollout(self.model), step)
            row["fires"] = attached.ledger.forward
        return {what: row}

    def score(self, what: str, processes: int) -> dict[str, Row]:
        """Scores in processes of their own, with a model of their own."""
        return {what: side_by_side(processes, max(1, self.pairs // 2), smoke=self.smoke)}

    # ---- the cases

    def cases(self) -> dict[str, Case]:
        """Every case, by name."""
        linear, products, mxfp4 = f"{NOISE}@module.linear", f"{NOISE}@op.matmul", "mxfp4@module.linear"
        decode, train = partial(self.decode, captured=True), partial(self.train, captured=True)
        beside: list[tuple[str, str, Callable[[Any], Run]]] = [
            ("prefill eager, identity plan", "relative_gaussian:0@module.linear", self.prefill),
            (f"prefill eager, {LINEARS}", linear, self.prefill),
            ("prefill eager, naive hook", "", self.prefill),
            ("prefill eager, op.matmul", products, self.prefill),
            ("prefill eager, mxfp4 W4A4", mxfp4, self.prefill),
            (f"decode eager, {LINEARS}", linear, self.decode),
            ("decode eager, naive hook", "", self.decode),
            (f"decode captured, {LINEARS}", linear, decode),
            ("decode captured, naive hook", "", decode),
            (f"training step eager, {LINEARS}", linear, self.train),
            ("training step eager, op.matmul forward + backward", products, self.train),
            ("training step eager, naive hook", "", self.train),
            ("training step captured, op.matmul forward + backward", products, train),
            ("training step captured, naive hook", "", train),
        ]
        for what, mode in (("prefill compiled", "default"), ("prefill compiled and captured", "reduce-overhead")):
            compiled = partial(self.prefill, compiled=mode)
            beside += [(f"{what}, {LINEARS}", linear, compiled), (f"{what}, naive hook", "", compiled)]
        found: dict[str, Case] = {}
        for what, plan, make in beside:
            found[what] = partial(self.beside_clean, what, plan, make, shaken if plan else naive)
        name = "rollout eager, AQN on all norms"
        found[name] = partial(self.aqn, name, self.rollout)
        for what, plan in ((LINEARS, linear), ("op.matmul", products), ("mxfp4 W4A4", mxfp4)):
            found[f"first pass to ten passes eager, {what}"] = partial(self.opened, what, plan)
        if self.name == "smollm2-135m":
            for processes, beside_whom in ((1, "alone"), (4, "worst of four side by side")):
                name = f"score of {PROBLEMS} problems, {beside_whom}"
                found[name] = partial(self.score, name, processes)
        return found

    def wanted(self, choice: Choice) -> dict[str, Case]:
        """The cases that are asked for and can run on this device."""
        possible = {what: case for what, case in self.cases().items() if not (self.smoke and " captured" in what)}
        return {what: case for what, case in possible.items() if choice.has(f"{self.name} {what}")}

    def measured(self, choice: Choice) -> Iterator[dict[str, Row]]:
        """The rows of one case after the other."""
        for case in self.wanted(choice).values():
            yield case()


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


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of a case's name; alternatives between commas")
    parser.add_argument("--without", nargs="*", default=[], help="the same for cases that are left out")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU; nothing captured, no bandwidth, no locate")
    options = parser.parse_args()
    if options.smoke and options.out == HERE:
        parser.error("--smoke measures nothing that should stand in gpu.json: give --out FOLDER")
    if not (options.smoke or options.list or torch.cuda.is_available()):
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; --smoke tries it on a CPU, benchmarks/speed.py is for CPUs")
    return options


def main() -> None:
    """Run what is asked for."""
    options = parsed()
    choice = Choice(options.only, options.without)
    if options.list:
        names = [f"{name} {what}" for name in SHAPES for what in Bench(name, 1).wanted(choice)]
        print("\n".join([*names, *(name for name in (BANDWIDTH, LOCATE) if choice.has(name))]))
        return
    device = platform.machine() if options.smoke else torch.cuda.get_device_name()
    facts = earlier(options.out, {"device": device} | {name: version(name) for name in ("torch", "transformers", "triton")})

    def note(name: str, rows: dict[str, Row]) -> None:
        for what, row in rows.items():
            dated = {"date": time.strftime("%Y-%m-%d"), "pairs": options.pairs} | row
            facts["results"].setdefault(name, {})[what] = dated
            print(f"{name} {what}: {row['ratio']:.3f} ({row['clean_seconds'] * 1e3:.2f} ms clean)", flush=True)
        write(facts, options.out)

    if choice.has(BANDWIDTH) and not options.smoke:
        facts["bandwidth"] = bandwidth(options.pairs)
        for name, row in facts["bandwidth"].items():
            print(f"{name}: {row['terabytes_per_second']:.2f} TB/s", flush=True)
    for name in SHAPES:
        for rows in Bench(name, options.pairs, options.smoke).measured(choice):
            note(name, rows)
        torch.cuda.empty_cache()
    if choice.has(LOCATE) and not options.smoke:
        facts["locate"] = locating()
    write(facts, options.out)


if __name__ == "__main__":
    main()

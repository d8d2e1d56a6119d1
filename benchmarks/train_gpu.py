"""What training under faults costs on a GPU: a step of ours beside a step of plain TRL, and how many runs a GPU carries.

SmolLM2-135M, arithmetic, 64 problems × 8 answers of 12 tokens at most, bfloat16 arithmetic over float32 weights.

Steps: every arm is a whole training run in a thread of its own, and the threads take turns step by step (`train.py`), so that
what the machine does meanwhile happens to all of them. A step lasts from its begin to the begin of the next. Sampling is TRL's
`generate` or our decoder, the loss is all forwards and backwards, the rest is rewards, tokens, bookkeeping and the optimizer;
the device is waited for at each border. Memory is what a step takes above what lay there when it began.

Campaign: several processes train side by side. All are started and warmed up once; then one of them, two, three and so on
do some steps each, and their steps per second are added up.

    python benchmarks/train_gpu.py                     # on a GPU: writes train_gpu.json and train_gpu.md beside this file
    python benchmarks/train_gpu.py --smoke --out /tmp/x.json    # nano on a CPU, two steps: does it run?
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from rich.console import Console
from trl import GRPOConfig, GRPOTrainer

from shaketable.evaluate.tasks import load_task
from shaketable.evaluate.tasks.task import train_problems
from shaketable.faults.rng import key_of
from shaketable.models import hush, load_model, quieten
from shaketable.records.record import RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training, _prompt
from train import Turns

HERE = Path(__file__).parent
PLAN = "relative_gaussian:0.01@module.linear"
AQN = "constant:0.01"
PLAIN = "plain TRL"
ARMS: dict[str, dict[str, Any]] = {
    "ours, plan and AQN off": {},
    "ours, AQN": {"aqn": AQN},
    "ours, plan in rollout and loss, and AQN": {"plan": PLAN, "aqn": AQN},
}
SHAKEN = "ours, plan in rollout and loss, and AQN"
WARM = 3
"""Steps before anything is timed: kernels are compiled."""
SMALL = {"model": "nano", "task": "arithmetic,max_new_tokens=12", "prompts": 4, "samples": 4, "micro_batch": 8}


class Phases:
    """Seconds that a trainer spends in some of its methods, with the device waited for at their borders."""

    def __init__(self, trainer: Any, device: str) -> None:
        self.trainer, self.device = trainer, device
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)
        self._wrap(trainer, "_generate_single_turn", "sampling")
        self._wrap(trainer, "_compute_loss", "loss")
        self._wrap(trainer.accelerator, "backward", "loss")

    def wait(self) -> None:
        """For the device."""
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            start = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self.wait()
                self.now[phase] += time.perf_counter() - start

        setattr(owner, name, timed)


class Enough(Exception):  # noqa: N818
    """All steps are timed: what a run does at its end is not."""


class Seat(transformers.TrainerCallback):
    """An arm's place among the turns; also reads its phases and its memory."""

    def __init__(self, turns: Turns, name: str, phases: Phases, gate: threading.Barrier) -> None:
        self.turns, self.name, self.phases, self.gate = turns, name, phases, gate
        self.begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step before is over; wait for the turn of this one. The first begins when all arms are there."""
        if self.begun:
            self._end()
            self.turns.give(self.name)
        else:
            self.gate.wait()
        if state.global_step == args.max_steps - 1:
            raise Enough
        self.turns.take(self.name)
        self.begun = True
        if self.phases.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
            self.resident = torch.cuda.memory_allocated()

    def _end(self) -> None:
        self.phases.wait()
        used = 0.0
        if self.phases.device.startswith("cuda"):
            used = (torch.cuda.max_memory_allocated() - self.resident) / 2**30
        self.phases.steps.append({**self.phases.now, "memory": used})
        self.phases.now = defaultdict(float)


def run_config(options: argparse.Namespace, steps: int, more: dict[str, Any]) -> TrainConfig:
    """Our run; scores and checkpoints lie outside of the timed steps."""
    fields = {
        "model": options.model, "task": options.task, "steps": steps, "prompts": options.prompts, "samples": options.samples,
        "micro_batch": options.micro_batch, "lr": 1e-5, "eval_n": 1, "eval_batch": 1, "save_every": steps, "report_to": (),
        "device": options.device, "dtype": "float32" if options.device == "cpu" else "bfloat16",
    }  # fmt: skip
    return TrainConfig.checked(**(fields | more))


def ours(options: argparse.Namespace, steps: int, folder: Path, more: dict[str, Any]) -> Training:
    """`shaketable train`, as the command makes it."""
    config = run_config(options, steps, more)
    return Training(config, RunRecord.create(folder, "train", config.model_dump(mode="json"), {}))


def plain(options: argparse.Namespace, steps: int, folder: Path) -> Any:
    """GRPOTrainer as TRL ships it, on the same model, problems, batch and micro-batch."""
    config = run_config(options, steps, {})
    model, tokenizer = load_model(options.model, device=options.device, dtype=torch.float32)
    task = load_task(options.task)
    problems = train_problems(task, config.steps * config.prompts, lambda i: key_of(config.seed, "data", i))

    def reward(completions: list[Any], problem: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [task.reward(task.score(problems[i], text)) for i, text in zip(problem, texts, strict=True)]

    args = GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=config.batch // options.micro_batch, num_generations=options.samples,
        max_completion_length=task.max_new_tokens, learning_rate=1e-5, lr_scheduler_type="constant", shuffle_dataset=False,
        bf16=config.dtype == "bfloat16", use_cpu=options.device == "cpu", gradient_checkpointing=False, logging_steps=1,
        dataloader_pin_memory=options.device != "cpu", report_to=[], disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"prompt": _prompt(tokenizer, task, p), "problem": i} for i, p in enumerate(problems)]
    return GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows)
    )


def step_rows(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Medians of each arm, and its ratio to plain TRL in the same round."""
    names, total = [PLAIN, *ARMS], options.rounds + options.warm + 1
    turns, phases, gate = Turns(names), {}, threading.Barrier(len(names))
    with tempfile.TemporaryDirectory() as work:
        runs: dict[str, Any] = {PLAIN: plain(options, total, Path(work) / "plain")}
        for i, (name, more) in enumerate(ARMS.items()):
            runs[name] = ours(options, total, Path(work) / str(i), more)
        for name, run in runs.items():
            trainer = run if name == PLAIN else run.trainer
            for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
                trainer.remove_callback(callback)
            phases[name] = Phases(trainer, options.device)
            trainer.add_callback(Seat(turns, name, phases[name], gate))
        threads = [threading.Thread(target=_thread, args=(r.train if n == PLAIN else r.run,)) for n, r in runs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        proof = {name: _proof(runs[name].ledgers()) for name in ARMS}
    timed = slice(options.warm, options.warm + options.rounds)
    base = turns.times[PLAIN][timed]
    rows = {}
    for name in names:
        found = _row(turns.times[name][timed], base, phases[name].steps[timed])
        rows[name] = found | {"proof": proof.get(name, "")}
    return rows


def _thread(run: Callable[[], None]) -> None:
    """An arm. One that fails would leave the others waiting for their turn for ever, so it ends the whole benchmark."""
    try:
        run()
    except Enough:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _row(seconds: list[float], base: list[float], steps: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: statistics.median(s.get(name, 0.0) for s in steps) for name in ("sampling", "loss", "memory")}
    rest = [t - s.get("sampling", 0.0) - s.get("loss", 0.0) for t, s in zip(seconds, steps, strict=True)]
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    return {
        "seconds": statistics.median(seconds), **middle, "rest": statistics.median(rest), "ratio": statistics.median(ratios),
        "all_seconds": [round(t, 4) for t in seconds],
    }  # fmt: skip


def _proof(ledgers: dict[str, Any]) -> str:
    return "; ".join(f"{n}: {v['forward'] + v['backward']:,} injections" for n, v in ledgers.items())


# ---- side by side


class Ordered(transformers.TrainerCallback):
    """Does as many steps as a line on standard input says, and says how long they took."""

    def __init__(self) -> None:
        self.left, self.started = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Out of steps: report, and wait for more."""
        if self.left == 0:
            self._report()
            line = sys.stdin.readline()
            if not line:
                raise Enough
            self.left, self.started = int(line), time.perf_counter()
        self.left -= 1

    def _report(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        seconds = time.perf_counter() - self.started if self.started else 0.0
        print(json.dumps({"seconds": seconds, "memory": memory}), flush=True)


def child(options: argparse.Namespace) -> None:
    """One of the processes of a campaign."""
    with tempfile.TemporaryDirectory() as work:
        run = ours(options, options.child, Path(work) / "run", ARMS[SHAKEN])
        run.trainer.add_callback(Ordered())
        with suppress(Enough):
            run.run()


def campaign(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps per second of 1, 2, … processes side by side, added up."""
    sizes, steps = sorted(options.side_by_side), options.campaign_steps
    handed = {n: 1 + options.warm + steps * sum(k > n for k in sizes) for n in range(max(sizes))}
    command = [sys.executable, __file__, "--device", options.device, "--model", options.model, "--task", options.task]
    command += ["--prompts", str(options.prompts), "--samples", str(options.samples), "--micro-batch", str(options.micro_batch)]
    command += ["--threads", str(options.threads)]
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    children = [
        subprocess.Popen(
            [*command, "--child", str(handed[n])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
        for n in handed
    ]
    try:
        for process in children:
            _answer(process, log)
            _order(process, options.warm)
        for process in children:
            _answer(process, log)
        rows = []
        for k in sizes:
            for process in children[:k]:
                _order(process, steps)
            answers = [_answer(process, log) for process in children[:k]]
            together = sum(steps / a["seconds"] for a in answers)
            rows.append({"processes": k, "steps_per_second": together, "memory": max(a["memory"] for a in answers)})
            print(f"{k} side by side: {together:.2f} steps/s", file=sys.stderr, flush=True)
        for process in children:
            process.stdin.close()
            process.wait(60)
        return rows
    finally:
        for process in children:
            process.kill()
            process.wait()


def _order(process: Any, steps: int) -> None:
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()


def _answer(process: Any, log: Any) -> dict[str, float]:
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    log.seek(0)
    raise SystemExit(f"a process of the campaign ended early:\n{log.read()[-3000:]}")


# ---- writing


def tables(rows: dict[str, dict[str, Any]], side: list[dict[str, Any]]) -> list[str]:
    """Both tables, as lines of Markdown."""
    lines = ["| arm | step | sampling | loss | rest | to plain TRL | memory of a step | proof |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, r in rows.items():
        times = " | ".join(f"{r[k]:.3f} s" for k in ("seconds", "sampling", "loss", "rest"))
        lines.append(f"| {name} | {times} | {r['ratio']:.2f} | {r['memory']:.1f} GiB | {r['proof']} |")
    if side:
        lines += ["", "| runs side by side | steps/s, all together | memory of one run |", "|---|---|---|"]
        lines += [f"| {r['processes']} | {r['steps_per_second']:.2f} | {r['memory']:.1f} GiB |" for r in side]
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="arithmetic,level=2,max_new_tokens=12")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument(
        "--side-by-side", type=int, nargs="*", default=[1, 2, 3, 4, 6], help="processes of the campaign, e.g. 1 4"
    )
    parser.add_argument("--only", choices=["steps", "campaign"], help="one half of it")
    parser.add_argument("--campaign-steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="cores of each process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="nano on a CPU, as little as there can be")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "train_gpu.json")
    options = parser.parse_args()
    if any(k < 1 for k in options.side_by_side):
        parser.error(
            f"--side-by-side counts processes from 1 on, not {min(options.side_by_side)}; --only steps leaves the campaign out"
        )
    if not (options.smoke or options.device == "cpu" or torch.cuda.is_available()):
        raise SystemExit(
            "benchmarks/train_gpu.py needs a CUDA device; --smoke tries it on a CPU, benchmarks/train.py is for CPUs"
        )
    if options.smoke:
        for name, value in SMALL.items():
            setattr(options, name, value)
        options.device, options.rounds, options.warm, options.campaign_steps = "cpu", 2, 1, 1
        options.side_by_side, options.threads = [k for k in options.side_by_side if k <= 2], 1
    return options


def main() -> None:
    """Measure, print, write."""
    options = parsed()
    hush()
    quieten()
    torch.set_num_threads(options.threads)
    if options.child:
        child(options)
        return
    rows = {} if options.only == "campaign" else step_rows(options)
    gc.collect()
    if options.device != "cpu":
        torch.accelerator.empty_cache()
    side = campaign(options) if options.side_by_side and options.only != "steps" else []
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    facts = {
        "date": time.strftime("%Y-%m-%d"), "device": gpu, "torch": torch.__version__, "transformers": transformers.__version__,
        "trl": trl.__version__, "model": options.model, "task": options.task, "answers": options.prompts * options.samples,
        "micro_batch": options.micro_batch, "rounds": options.rounds,
    }  # fmt: skip
    options.out.write_text(json.dumps({**facts, "steps": rows, "campaign": side}, indent=1) + "\n")
    lines = ["# Training on a GPU", "", ", ".join(f"{k} {v}" for k, v in facts.items()), "", *tables(rows, side)]
    lines += ["", f"Plan: `{PLAN}`; AQN: `{AQN}`. Medians of interleaved steps; the campaign has both on.", ""]
    options.out.with_suffix(".md").write_text("\n".join(lines))
    Console(highlight=False, width=160).print("\n".join(lines), markup=False)


if __name__ == "__main__":
    main()

"""What training under faults costs on a CPU: a step of ours against a step of plain TRL, in one process and one run.

nano, arithmetic, 16 problems × 8 answers a step. Every arm is a whole training run in a thread of its own, and the threads
take turns step by step: plain, ours off, ours shaken, plain, …; never do two run at once. A step is timed from its begin to
the begin of the next, so that all of a trainer's own work counts. Ratios are medians over the rounds, of each arm to plain TRL
in the same round. The shaken arm also proves that its errors were there.

The sweep is timed the same way: answers to 512 problems by our decoder against `model.generate`, same batch, same answers.

    make bench-train           # writes train.json and train.md beside this file
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from trl import GRPOConfig, GRPOTrainer

from shaketable.evaluate.score import Condition, Evaluator
from shaketable.evaluate.tasks import load_task, sample
from shaketable.evaluate.tasks.task import train_problems
from shaketable.faults.rng import key_of
from shaketable.models import hush, load_model
from shaketable.plan import Plan
from shaketable.records.record import RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training

HERE = Path(__file__).parent
PLAN = "relative_gaussian:0.05@op.matmul"
AQN = "constant:0.01"
ARMS: dict[str, dict[str, Any]] = {
    "ours, plan and AQN off": {},
    "ours, AQN on": {"aqn": AQN},
    "ours, operator plan, forward + backward": {"plan": PLAN},
    "ours, operator plan and AQN": {"plan": PLAN, "aqn": AQN},
}
TARGETS = {"ours, plan and AQN off": "≤ 1.02", "ours, operator plan and AQN": "≤ 1.35", "sweep, clean": "≥ 0.9"}


class Turns(transformers.TrainerCallback):
    """Lets one thread at a time do a step, in order, and notes how long each took."""

    def __init__(self, order: list[str]) -> None:
        self.order, self.at, self.lock = order, 0, threading.Condition()
        self.times: dict[str, list[float]] = {name: [] for name in order}
        self.started = 0.0
        self.running: str | None = None

    def seat(self, name: str) -> transformers.TrainerCallback:
        """The callback of one arm."""
        return _Seat(self, name)

    def take(self, name: str) -> None:
        """Wait for this arm's turn."""
        with self.lock:
            self.lock.wait_for(lambda: self.order[self.at % len(self.order)] == name and self.running is None)
            self.running, self.started = name, time.perf_counter()

    def give(self, name: str) -> None:
        """The step is over: the next arm's turn."""
        with self.lock:
            if self.running == name:
                self.times[name].append(time.perf_counter() - self.started)
                self.running = None
                self.at += 1
                self.lock.notify_all()

    def leave(self, name: str) -> None:
        """The arm has no more steps."""
        self.give(name)


class _Seat(transformers.TrainerCallback):
    def __init__(self, turns: Turns, name: str) -> None:
        self.turns, self.name = turns, name

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.give(self.name)
        self.turns.take(self.name)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.leave(self.name)


def plain(steps: int, folder: Path) -> Any:
    """GRPOTrainer as TRL ships it, on the same model and problems."""
    model, tokenizer = load_model("nano")
    task = load_task("arithmetic")
    problems = train_problems(task, 16 * steps, lambda i: key_of(0, "data", i))

    def reward(completions: list[str], problem: list[int], **_: Any) -> list[float]:
        return [task.reward(task.score(problems[i], text)) for i, text in zip(problem, completions, strict=True)]

    args = GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=128, num_generations=8, max_completion_length=16,
        learning_rate=1e-4, lr_scheduler_type="constant", bf16=False, use_cpu=True, gradient_checkpointing=False,
        dataloader_pin_memory=False, report_to=[], disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"prompt": p.question, "problem": i} for i, p in enumerate(problems)]
    return GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows)
    )


def ours(steps: int, folder: Path, more: dict[str, Any]) -> Training:
    """Our run with the same batch; scores and checkpoints only outside of the timed steps."""
    fields = {"model": "nano", "task": "arithmetic", "steps": steps, "eval_n": 1, "save_every": steps, "lr": 1e-4}
    config = TrainConfig(**(fields | more))
    return Training(config, RunRecord.create(folder, "train", config.model_dump(mode="json"), {}))


def train_ratios(rounds: int) -> tuple[dict[str, dict[str, Any]], float]:
    """Ratio of each arm's step to plain TRL's, and plain TRL's median seconds."""
    names = ["plain TRL", *ARMS]
    turns, skip = Turns(names), 2
    with tempfile.TemporaryDirectory() as work:
        runs: dict[str, Any] = {"plain TRL": plain(rounds + skip, Path(work) / "plain")}
        for i, (name, more) in enumerate(ARMS.items()):
            runs[name] = ours(rounds + skip, Path(work) / str(i), more)
        for name, run in runs.items():
            trainer = run if name == "plain TRL" else run.trainer
            for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
                trainer.remove_callback(callback)
            trainer.add_callback(turns.seat(name))
        threads = [threading.Thread(target=r.train if n == "plain TRL" else r.run) for n, r in runs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        proof = {name: _proof(runs[name].whole) for name in ARMS}
    base = turns.times["plain TRL"][skip : skip + rounds]
    rows = {}
    for name in ARMS:
        ratios = [a / b for a, b in zip(turns.times[name][skip : skip + rounds], base, strict=True)]
        rows[name] = _row(ratios) | {"proof": proof[name]}
    return rows, statistics.median(base)


def _proof(ledgers: dict[str, Any]) -> str:
    return "; ".join(f"{n}: {v['forward'] + v['backward']:,} injections" for n, v in ledgers.items())


def _row(ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def sweep_ratios(rounds: int, batch: int = 128, n: int = 512) -> dict[str, dict[str, Any]]:
    """Throughput of a sweep's scoring over that of `model.generate` on the same prompts and batch."""
    model, tokenizer = load_model("nano")
    task = load_task("arithmetic")
    evaluator = Evaluator(model, tokenizer, task, sample(task, "test", n, 0), batch)
    ids = torch.tensor(evaluator.prompts)
    plan = Plan.parse(PLAN)
    ratios: dict[str, list[float]] = {"sweep, clean": [], f"sweep, {PLAN}": []}
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with torch.no_grad():
            for at in range(0, n, batch):
                model.generate(ids[at : at + batch], max_new_tokens=task.max_new_tokens, do_sample=False)
        generate = time.perf_counter() - start
        for name, condition in zip(ratios, (Condition("clean"), Condition.of("plan", plan)), strict=True):
            ratios[name].append(generate / evaluator.score(condition).seconds)
    return {name: _row(found[1:]) for name, found in ratios.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "train.json")
    options = parser.parse_args()
    hush()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    rows, seconds = train_ratios(options.rounds)
    rows |= sweep_ratios(options.rounds)
    facts = {
        "date": time.strftime("%Y-%m-%d"), "rounds": options.rounds, "threads": options.threads, "machine": platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__, "plain_trl_step_seconds": round(seconds, 3),
    }  # fmt: skip
    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    table = Table("arm", "ratio", "quartiles", "target", "proof")
    lines = ["# Training and sweeping on a CPU", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    lines += ["Ratios to plain TRL's step (training), and throughput over `model.generate` (sweep).", ""]
    lines += ["| arm | ratio | quartiles | target | proof |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        cells = (
            name,
            f"{row['ratio']:.3f}",
            f"{row['low']:.2f}–{row['high']:.2f}",
            TARGETS.get(name, ""),
            row.get("proof", ""),
        )
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    Console().print(table, f"plain TRL: {seconds:.3f} s a step")


if __name__ == "__main__":
    main()

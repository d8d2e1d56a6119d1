"""What a score under a plan costs on a GPU, alone and beside others: 256 arithmetic problems, greedy, rows leave as they end.

As training and studies score: weights in float32, products in bfloat16 by autocast, one injection opened and closed for each
score, the batch size found as the command finds it. In each process clean and faulty scores take turns, and its ratio is the
median over the pairs. Processes that run side by side are started, warmed up, and then told to begin at once.

SmolLM2-135M where its weights are on the machine. Else random weights of its shape, which write the characters of nano's
tokenizer: all other rows of the output matrix are zero, and every eighth character ends an answer. The output matrix is not
tied to the embeddings, and weights are five times as large as usual; else a token is mostly followed by itself, and rows stay.

    python benchmarks/gpu_score.py --processes 4                          # one row, on a GPU
    python benchmarks/gpu_score.py --processes 2 --smoke --pairs 2        # tiny, on a CPU: does it run?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch

from first_pass import Row, spread
from gpu_models import build
from shaketable.evaluate.decoding import batches, probe_batch_size
from shaketable.evaluate.score import Condition, Evaluation, Evaluator, arithmetic
from shaketable.evaluate.tasks import load_task, sample
from shaketable.io.cache_folder import cache_folder
from shaketable.models import load_model
from shaketable.plan import Plan

PLAN = "relative_gaussian:0.1@module.linear"
PROBLEMS = 256
WARM = 2
"""Pairs before anything is timed: kernels are compiled."""
THREADS = 2
"""Cores of each process."""


def subject(device: str, small: bool) -> tuple[Evaluator, str]:
    """What is scored, and in words whose weights they are."""
    task = load_task("arithmetic")
    problems = sample(task, "test", 16 if small else PROBLEMS, 0)
    here = not small and any(cache_folder().glob("smollm2-135m-*/config.json"))
    if here:
        model, tokenizer = load_model("smollm2-135m", device=device, dtype=torch.float32)
    else:
        _, tokenizer = load_model("nano")
        model = random_writer(len(tokenizer), device, small)
    evaluator = Evaluator(model, tokenizer, task, problems, 1)
    if not here:
        evaluator.decoder = replace(evaluator.decoder, ends=tuple(range(1, len(tokenizer), 8)))
    evaluator.batch_size = probe_batch_size(evaluator.decoder, model, evaluator.prompts)
    return evaluator, "SmolLM2-135M-Instruct" if here else "random weights"


def random_writer(characters: int, device: str, small: bool) -> Any:
    """A model of SmolLM2's shape that writes the first tokens of its vocabulary only."""
    model = build("smollm2-135m", device, torch.float32, small=small, tie_word_embeddings=False, initializer_range=0.1)
    with torch.no_grad():
        model.lm_head.weight[characters:] = 0
    return model


def pair(evaluator: Evaluator, device: str, seed: int) -> tuple[Evaluation, Evaluation]:
    """A clean score and a faulty one, each under its own autocast: the cast weights of one are not there for the other."""
    with arithmetic(device, "bfloat16"):
        clean = evaluator.score(Condition("clean"))
    with arithmetic(device, "bfloat16"):
        return clean, evaluator.score(Condition.of("faulty", Plan.parse(PLAN, seed=seed)))


def passes(evaluator: Evaluator, found: Evaluation) -> int:
    """Forward passes of a score: in each batch as many as its longest answer has tokens."""
    done = found.completions
    return sum(max(len(done[i].tokens) for i in indices) for indices in batches(evaluator.prompts, evaluator.batch_size))


def child(options: argparse.Namespace) -> None:
    """One process: warms up, waits for a line on standard input, measures, and prints what it found."""
    device = "cpu" if options.smoke else "cuda"
    evaluator, weights = subject(device, options.smoke)
    for seed in range(WARM):
        pair(evaluator, device, seed)
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    pairs = [pair(evaluator, device, seed) for seed in range(options.pairs)]
    found = {
        **spread([faulty.seconds / clean.seconds for clean, faulty in pairs]),
        "clean_seconds": statistics.median(clean.seconds for clean, _ in pairs),
        "clean_passes": statistics.median(passes(evaluator, clean) for clean, _ in pairs),
        "faulty_passes": statistics.median(passes(evaluator, faulty) for _, faulty in pairs),
        "fires": sum(faulty.ledger.forward for _, faulty in pairs if faulty.ledger is not None),
        "problems": len(evaluator.problems),
        "batch_size": evaluator.batch_size,
        "weights": weights,
    }
    print(json.dumps(found), flush=True)


def side_by_side(processes: int, pairs: int, *, smoke: bool = False) -> Row:
    """The row of the process whose ratio is the worst, and the ratios of all."""
    command = [sys.executable, __file__, "--child", "--pairs", str(pairs), *(["--smoke"] if smoke else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if smoke else str(THREADS)}
    with tempfile.TemporaryFile("w+") as log:
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            for _ in range(processes)
        ]
        try:
            for process in children:
                _answer(process, log)
            for process in children:
                process.stdin.write("go\n")
                process.stdin.flush()
            found = [_answer(process, log) for process in children]
        finally:
            for process in children:
                process.kill()
                process.wait()
    worst = max(found, key=lambda row: row["ratio"])
    return worst | {"each": sorted(row["ratio"] for row in found), "pairs": pairs}


def _answer(process: Any, log: Any) -> Row:
    """The next line of JSON that a process prints."""
    for line in process.stdout:
        if line.startswith("{"):
            found: Row = json.loads(line)
            return found
    log.seek(0)
    raise SystemExit(f"a process that scores ended early:\n{log.read()[-3000:]}")


def main() -> None:
    """Print one row, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if not (options.smoke or torch.cuda.is_available()):
        raise SystemExit("benchmarks/gpu_score.py needs a CUDA device; --smoke tries it on a CPU")
    print(json.dumps(side_by_side(options.processes, options.pairs, smoke=options.smoke), indent=2))


if __name__ == "__main__":
    main()

"""Does noise in training make a model stand noise? The worked example of docs/train.md, from one command to its figure.

    make example-harden          # five arms × five seeds on nano; about 20 minutes on two cores, resumable

Each run is one `shaketable train` command, printed before it starts. A run that is finished is not done again, one that was
killed goes on. At the end the scores are read from the run records, compared over seeds and problems (noise with clean
training, AQN with noise alone), and drawn. Everything a number needs to be believed is in `results/harden`: records and
ledgers of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from shaketable.evaluate.statistics import Comparison, corrected, over_seeds
from shaketable.records.record import RunRecord
from shaketable.train.summary import outcome

HOME = Path(__file__).parent.parent / "results" / "harden"
NOISE = "relative_gaussian:0.05@op.matmul"
HARD = "relative_gaussian:0.2@op.matmul"
AQN = {"AQN global": "global_decay:0.05-0.0005,stages=10", "AQN epochs": "epoch_aware:0.05-0.01+0.01-0.0005"}
ARMS: dict[str, list[str]] = {
    "clean": ["--plan", NOISE, "--plan-in", "eval"],
    "5 % noise": ["--plan", NOISE],
    "5 % + AQN global": ["--plan", NOISE, "--aqn", AQN["AQN global"]],
    "5 % + AQN epochs": ["--plan", NOISE, "--aqn", AQN["AQN epochs"]],
    "20 % noise": ["--plan", HARD, "--eval-plan", NOISE],
}
AGAINST = {"5 % noise": "clean", "20 % noise": "clean", "5 % + AQN global": "5 % noise", "5 % + AQN epochs": "5 % noise"}
"""What each arm is compared with: noise with clean training (what it cost), AQN with noise alone (what it bought)."""
CONDITIONS = {"clean": "scored clean", NOISE: "scored under 5 % noise", HARD: "scored under 20 % noise"}
COLORS = ("#4c5f7a", "#2a7f9e", "#d08a2e", "#b8533f", "#6b4c9a")


def command(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of one run, or the one that goes on with it."""
    start = [sys.executable, "-m", "shaketable", "train"]
    if (folder / "record.jsonl").exists():
        return [*start, "--resume", str(folder)]
    hard = [] if HARD in ARMS[arm] else ["--eval-plan", HARD]
    common = ["nano", "--task", "arithmetic", "--steps", str(options.steps), "--eval-every", str(options.steps // 3)]
    common += ["--limit", str(options.n), "--save-every", str(options.steps), "--seed", str(seed), "--out", str(folder)]
    return [*start, *common, *ARMS[arm], *hard]


def run(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, done unless it is; returns what it came to."""
    folder = options.out / f"{arm.replace(' ', '').replace('%', '')}-{seed}"
    if not _finished(folder):
        line = command(arm, seed, folder, options)
        print(shlex.join(["shaketable", *line[3:]]), flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
    return outcome(RunRecord.open(folder, "train"))


def _finished(folder: Path) -> bool:
    return (folder / "record.jsonl").exists() and bool(RunRecord.open(folder, "train").events("finished"))


def answers(arm: str, seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Scores of every problem at the last step, by the plan of the condition."""
    folder = options.out / f"{arm.replace(' ', '').replace('%', '')}-{seed}"
    last = RunRecord.open(folder, "train").events("evaluation")[-1]
    return {c["plan"] or "clean": [float(a["correct"]) for a in c["answers"]] for c in last["conditions"]}


def compare(options: argparse.Namespace) -> tuple[dict[str, dict[str, np.ndarray]], list[tuple[str, str, Comparison]]]:
    """Scores (seeds × problems) by arm and condition, and every arm against its base, as one family."""
    seeds = range(options.seeds)
    found = {arm: [answers(arm, seed, options) for seed in seeds] for arm in ARMS}
    scores = {arm: {c: np.array([run[c] for run in runs]) for c in CONDITIONS} for arm, runs in found.items()}
    asked = [(arm, c) for c in CONDITIONS for arm in AGAINST]
    done = corrected([over_seeds(scores[AGAINST[arm]][c], scores[arm][c]) for arm, c in asked])
    return scores, [(arm, c, comparison) for (arm, c), comparison in zip(asked, done, strict=True)]


def draw(scores: dict[str, dict[str, np.ndarray]], compared: list[tuple[str, str, Comparison]], path: Path) -> None:
    """One panel per condition: a dot per seed, the mean, and where it may lie by the interval of its difference."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(CONDITIONS), sharey=True)
    known = {(arm, c): comparison for arm, c, comparison in compared}
    for axes, (condition, title) in zip(panels, CONDITIONS.items(), strict=True):
        for at, (arm, color) in enumerate(zip(ARMS, COLORS, strict=True)):
            means = 100 * scores[arm][condition].mean(axis=1)
            spread = np.linspace(-0.14, 0.14, len(means))
            axes.plot(at + spread, means, "o", color=color, alpha=0.55, markersize=5)
            axes.hlines(means.mean(), at - 0.28, at + 0.28, color=color, linewidth=3)
            if (arm, condition) in known:
                c = known[arm, condition]
                base = 100 * scores[AGAINST[arm]][condition].mean()
                low, high = base + 100 * c.interval.low, base + 100 * c.interval.high
                axes.vlines(at + 0.33, low, high, color=color, linewidth=1.5)
                if c.distinguishable:
                    axes.annotate("*", (at, max(means.max(), high)), ha="center", va="bottom", fontsize=15, color=color)
        axes.axhline(100 * scores["clean"][condition].mean(), color="#999", linewidth=0.8, linestyle="--", zorder=0)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xticks(range(len(ARMS)), [a.replace(" + AQN ", " +\nAQN\n") for a in ARMS], fontsize=8)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy, %")
    figure.suptitle("nano after GRPO: how it was trained (below) and how it is scored (above)", fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def report(options: argparse.Namespace, facts: list[dict[str, Any]]) -> None:
    """Table, sentences and figure; the numbers as JSON beside them."""
    scores, compared = compare(options)
    table = Table("trained", *CONDITIONS.values())
    rows = []
    for arm in ARMS:
        means = [100 * scores[arm][c].mean(axis=1) for c in CONDITIONS]
        cells = [f"{m.mean():.1f} ± {m.std(ddof=1):.1f}" for m in means]
        table.add_row(arm, *cells)
        rows.append([arm, *cells])
    lines = [f"{arm} against {AGAINST[arm]}, {CONDITIONS[c]}: {comparison.sentence()}" for arm, c, comparison in compared]
    Console().print(table, *lines, sep="\n", highlight=False, soft_wrap=True)
    draw(scores, compared, options.out / "harden.png")
    text = ["| trained | " + " | ".join(CONDITIONS.values()) + " |", "|---|" + "---|" * len(CONDITIONS)]
    text += [f"| {' | '.join(row)} |" for row in rows]
    note = f"Mean and standard deviation over {options.seeds} seeds, {options.n} problems, {options.steps} steps."
    text += [
        "",
        note,
        "",
        "Differences (seeds and problems crossed, Holm over all of them):",
        "",
        *(f"- {x}" for x in lines),
    ]
    (options.out / "summary.md").write_text("\n".join(text) + "\n")
    result = [{"arm": a, "condition": c, **x.to_dict()} for a, c, x in compared]
    runs = [{k: f[k] for k in ("id", "config", "final", "warnings")} for f in facts]
    (options.out / "summary.json").write_text(json.dumps({"comparisons": result, "runs": runs}, indent=1) + "\n")


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--n", type=int, default=500, help="test problems")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--out", type=Path, default=HOME)
    options = parser.parse_args()
    wanted = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    with ThreadPoolExecutor(options.jobs) as pool:
        facts = list(pool.map(lambda pair: run(*pair, options), wanted))
    report(options, facts)


if __name__ == "__main__":
    main()

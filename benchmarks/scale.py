"""A thousand processes: what their ledgers weigh, how long they take to merge, and what wrong clocks and restarts do.

The ledgers are real: made by `Injection`, over the linears of a model with the modules of Qwen2.5-1.5B (28 layers, 196 linears
without the head, forward and backward, sampled and trained), hit often enough that every sum is there. Only the width is 16
instead of 1536: it changes no count, and next to no byte, of a ledger. They are written as the processes of a program write
them, one file each, in the form of `LedgerFile` (`shaketable run`) and of `Report` (verl's workers), and read by `collect`,
`read_reports` and `Span`, the functions that real runs call.

    python benchmarks/scale.py                 # 1,000 processes; writes scale.md and scale.json
    python benchmarks/scale.py --processes 50 --no-write

Three questions.

**How much?** Bytes of a ledger, of a run, and of a second (a process that goes on hitting writes its file again and again);
seconds and memory of merging, from 8 to 1,000 processes: it must grow with their number and no faster.

**Wrong clocks.** Machines do not agree on the time. The same thousand processes are collected with every `started` off by up to
an hour. Everything that is added must be the same; what may change is the order of a list, and which life of a restarted actor
is called the first.

**Restarts.** A worker that dies and comes back a hundred times, as a `shaketable run` and as a worker of verl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import merged, read_reports
from shaketable.integrations.verl.workers import Span, VerlWorkers
from shaketable.launch.ledger_file import PAUSE, SHARE
from shaketable.launch.run import collect
from shaketable.ledger.ledger import Ledger

HERE = Path(__file__).parent
PLAN = "relative_gaussian:0.05@module.linear,direction=both"
OPERATORS = "relative_gaussian:0.05@op.matmul"
SIZES = (8, 64, 256, 1000)
SKEW = 3600.0
LIVES = 100
ROUNDS = 3


def small_qwen() -> nn.Module:
    """The modules of Qwen2.5-1.5B, narrow."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 28, "num_attention_heads": 4}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **shape))


def hit(model: nn.Module, plan: str, rank: int) -> Ledger:
    """The ledger of a process that has sampled and trained."""
    tokens = (torch.arange(8) + rank)[None] % 64
    with st.inject(model, plan, seed=1, rank=rank) as ledger:
        model.eval()
        with torch.no_grad(), st.phase("rollout"):
            for _ in range(4):
                model(tokens)
        model.train()
        for _ in range(4):
            model(tokens, labels=tokens).loss.backward()
    return ledger


def process_record(ledger: dict[str, Any], number: int, *, actor: str = "", started: float = 0.0) -> dict[str, Any]:
    """What `LedgerFile` writes of one process."""
    place = f"Sampler#{number}" if actor else ""
    about = {"rank": number, "place": place, "actor": actor, "forked": False, "command": "train.py --config run.yaml"}
    about |= {"models": ["Qwen2ForCausalLM"], "late": [], "unmatched": []}
    head = {"schema": "shaketable.process/1", "pid": 1000 + number, "parent": 1, "started": started}
    return head | about | {"ledger": ledger}


def report(ledger: dict[str, Any], number: int, *, started: float = 0.0, mark: int = 1) -> dict[str, Any]:
    """What `Report` writes of one worker of verl: the same ledger, and its instructions."""
    head = {"schema": "shaketable.worker/1", "role": "actor", "pid": 1000 + number, "started": started, "mark": mark}
    return head | {"rank": number, "instructions": "0" * 16, "step": 1, "plan": ledger, "aqn": None, "sigma": 0.0, "sigmas": {}}


def write(folder: Path, kind: str, number: int, body: dict[str, Any]) -> int:
    """One file, as compact as `KeptFile` writes it; its bytes."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}-{body['pid']}-{number:08x}.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    return path.stat().st_size


def timed(task: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, Any]:
    """Median seconds of a task, and what it gave."""
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        found = task()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent), found


def peak(task: Callable[[], Any]) -> float:
    """Megabytes of Python objects that a task had at most."""
    tracemalloc.start()
    task()
    found = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return found


def volume(model: nn.Module) -> dict[str, Any]:
    """Bytes of one ledger, by level of the plan, and how many of them a busy process writes in a second."""
    found = {}
    for plan in (PLAN, OPERATORS):
        ledger = hit(model, plan, 0)
        seconds, text = timed(lambda ledger=ledger: json.dumps(ledger.to_dict()))
        pause = max(PAUSE, SHARE * seconds)
        spots = len(ledger.to_dict()["sites"][0]["spots"])
        found[plan] = {"bytes": len(text), "spots": spots, "seconds": seconds, "rate": len(text) / pause}
    return found


def merging(bodies: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    """Seconds and memory of collecting a run and of reading verl's reports, by the number of processes."""
    rows = []
    for n in sizes:
        rounds = ROUNDS if n < 512 else 1
        with tempfile.TemporaryDirectory() as name:
            run, workers = Path(name) / "run", Path(name) / "workers"
            size = sum(write(run, "process", i, process_record(bodies[i % len(bodies)], i)) for i in range(n))
            for i in range(n):
                write(workers, "worker", i, report(bodies[i % len(bodies)], i))
            collected, result = timed(lambda run=run: collect(run, ["train.py"], 0), rounds)
            assert result.ledger.processes == n
            assert result.ledger.forward == sum(bodies[i % len(bodies)]["forward"] for i in range(n))
            read, reports = timed(lambda workers=workers: read_reports(workers), rounds)
            span = Span(reports, reports)
            total, error = timed(lambda span=span: span.total("plan"), 1)[0], timed(span.error, 1)[0]
            memory = peak(lambda run=run: collect(run, ["train.py"], 0)) if n in (sizes[0], sizes[-1]) else None
        row = {"processes": n, "megabytes": size / 1e6, "collect": collected, "read": read, "memory": memory}
        rows.append(row | {"span_total": total, "span_error": error})
    return rows


def added(ledger: Ledger) -> dict[str, Any]:
    """All of a merged ledger that is a count; sums of floating numbers depend on their order, in the last digits."""
    site = ledger.to_dict()["sites"][0]
    whole = {name: spot["counts"] for name, spot in site["spots"].items()}
    return {"counts": whole, "phases": site["phases"], "layers": site["layers"], "changed": ledger.changed}


def skewed(bodies: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """The same processes with right clocks and with wrong ones."""
    clock = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        found = []
        for folder, skew in (("right", 0.0), ("wrong", SKEW)):
            for i in range(n):
                body = process_record(bodies[i % len(bodies)], i, started=i + clock.uniform(-skew, skew))
                write(Path(name) / folder, "process", i, body)
            found.append(collect(Path(name) / folder, ["train.py"], 0))
        lives = _lives_by_clock(Path(name), bodies[0])
    right, wrong = found
    errors = [r.ledger.to_dict()["sites"][0]["measured_magnitude"] for r in found]
    return {
        "processes": n,
        "counts_equal": added(right.ledger) == added(wrong.ledger),
        "magnitude_differs_by": abs(errors[0] - errors[1]) / errors[0],
        "rows_in_another_place": sum(a.pid != b.pid for a, b in zip(right.processes, wrong.processes, strict=True)),
        "lives_in_order": lives,
        "verl_strikes": _strikes_by_clock(bodies[0]),
    }


def _lives_by_clock(parent: Path, ledger: dict[str, Any]) -> list[int]:
    """Three lives of an actor; the machine of its second one is an hour behind."""
    for i, started in enumerate((100.0, 200.0 - SKEW, 300.0)):
        write(parent / "lives", "process", i, process_record(ledger, i, actor="abc", started=started))
    rows = {p.pid: p.life for p in collect(parent / "lives", ["train.py"], 0).processes}
    return [rows[1000 + i] for i in range(3)]


def _strikes_by_clock(ledger: dict[str, Any]) -> dict[str, int]:
    """Fires since the last reading, of one worker: `started` tells its lives apart, and is written once per life."""
    before, now = report(ledger, 0, started=5.0), report(ledger, 0, started=5.0)
    same_pid_other_life = report(ledger, 0, started=5.0 - SKEW)
    span = Span([before], [now])
    return {"same life": span.fires(now, "plan"), "new life, same pid": span.fires(same_pid_other_life, "plan")}


def restarts(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """One worker of eight dies and comes back a hundred times."""
    with tempfile.TemporaryDirectory() as name:
        run, workers = Path(name) / "run", Path(name) / "workers"
        for i in range(7):
            write(run, "process", i, process_record(bodies[i % len(bodies)], i, started=float(i)))
            write(workers, "worker", i, report(bodies[i % len(bodies)], i, started=float(i)))
        for life in range(LIVES + 1):
            body = process_record(bodies[0], 7, actor="abc", started=100.0 + life) | {"pid": 5000 + life}
            write(run, "process", 100 + life, body)
            write(workers, "worker", 100 + life, report(bodies[0], 7, started=100.0 + life) | {"pid": 5000 + life})
        seconds, result = timed(lambda: collect(run, ["train.py"], 0), 1)
        whole = merged(read_reports(workers))
        says = _verl_says(workers)
    expected = sum(bodies[i % len(bodies)]["forward"] for i in range(7)) + (LIVES + 1) * bodies[0]["forward"]
    assert whole is not None
    return {
        "lives": LIVES + 1,
        "files": len(result.processes),
        "seconds": seconds,
        "last_life": max(p.life for p in result.processes if p.actor),
        "fires_kept": result.ledger.forward == expected == whole.forward,
        "verl_says": says,
    }


def _verl_says(folder: Path) -> str:
    """What verl's trainer, which expects eight actors, makes of this folder."""
    instructions = Instructions(plan=PLAN, seed=1, ledger=str(folder))
    try:
        VerlWorkers(folder, {"actor": instructions}, 8, patience=0.0).read(1)
    except ShaketableError as error:
        return str(error).replace(str(folder), "the folder").partition(":")[0]
    return "nothing"


def page(found: dict[str, Any]) -> str:
    """The page."""
    lines = ["# A thousand processes", "", found["facts"], "", *_volume(found["volume"]), *_merging(found["merging"])]
    return "\n".join([*lines, *_clocks(found["skew"]), *_restarts(found["restarts"])]) + "\n"


def _volume(rows: dict[str, Any]) -> list[str]:
    lines = ["## Volume", ""]
    lines += ["| plan | spots | bytes of a ledger | ms to write down | MB/s of a busy process |", "|---|---|---|---|---|"]
    for plan, row in rows.items():
        cells = [str(row["spots"]), f"{row['bytes']:,}", f"{1e3 * row['seconds']:.1f}", f"{row['rate'] / 1e6:.2f}"]
        lines.append(f"| `{plan}` | {' | '.join(cells)} |")
    return lines


def _merging(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Merging",
        "",
        "`collect` ends a `shaketable run`; the rest is what verl's trainer does after each step.",
        "",
    ]
    head = (
        "| processes | files, MB | collect, s | peak memory, MB | read reports, s | fires of a step, s | error of a step, s |"
    )
    lines += [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row['megabytes']:.1f}", f"{row['collect']:.2f}", _cell(row["memory"], "{:.0f}"), f"{row['read']:.2f}"]
        cells += [f"{row['span_total']:.2f}", f"{row['span_error']:.2f}"]
        lines.append(f"| {row['processes']:,} | {' | '.join(cells)} |")
    return lines


def _clocks(skew: dict[str, Any]) -> list[str]:
    lines = ["", "## Wrong clocks", "", f"{skew['processes']:,} processes, each clock off by up to ±{SKEW:.0f} s.", ""]
    rows = {
        "counts, layers, phases, values changed: equal": _yes(skew["counts_equal"]),
        "measured magnitude differs by (the order of a sum)": f"{skew['magnitude_differs_by']:.0e}",
        "rows of the list of workers in another place": f"{skew['rows_in_another_place']:,}",
        "lives 1, 2, 3 of an actor, the second on a machine that is behind, are called": _list(skew["lives_in_order"]),
        "fires since the last reading: the same life, a new life with the same pid": _list(skew["verl_strikes"].values()),
    }
    return [*lines, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _restarts(found: dict[str, Any]) -> list[str]:
    lines = ["", "## Restarts", "", f"One worker of eight dies and comes back {found['lives'] - 1} times.", ""]
    rows = {
        "files": found["files"],
        "fires of all lives are in the merged ledger": _yes(found["fires_kept"]),
        "the last life is called": found["last_life"],
        "collect, s": f"{found['seconds']:.2f}",
        "verl's trainer says": found["verl_says"],
    }
    return [*lines, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _yes(fact: bool) -> str:
    return "yes" if fact else "**no**"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = small_qwen()
    bodies = [hit(model, PLAN, rank).to_dict() for rank in range(8)]
    where = f"cores {os.cpu_count()}, machine {platform.machine()}, python {platform.python_version()}"
    facts = f"date {time.strftime('%Y-%m-%d')}, {where}, one process, files in the page cache."
    found: dict[str, Any] = {"facts": facts, "volume": volume(model)}
    found["merging"] = merging(bodies, [*(n for n in SIZES if n < asked.processes), asked.processes])
    found["skew"], found["restarts"] = skewed(bodies, asked.processes), restarts(bodies)
    text = page(found)
    print(text)
    if not asked.no_write:
        (HERE / "scale.md").write_text(text, encoding="utf-8")
        (HERE / "scale.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

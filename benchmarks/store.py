"""How long it takes to list a store of 10,000 runs: from nothing, from the index, and where no index can be had.

The runs are made in a temporary folder: half of them finished and sealed, half not, in studies of a hundred. Nobody works on
them, so the unfinished half costs a look at a lock each. Listings are repeated, and the median is shown.

    python benchmarks/store.py            # 10,000 runs; writes store.md
    python benchmarks/store.py --runs 500 --no-write
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from shaketable.records.record import RunRecord
from shaketable.study.store import store as store_module
from shaketable.study.store.index import FILE, Index
from shaketable.study.store.store import Store

HERE = Path(__file__).parent
ROUNDS = 5
STEPS = 12
TARGET = 1.0


def make(root: Path, runs: int) -> int:
    """Fill a store; the bytes of its records. Nothing is synced to the disk: this is not what is measured."""
    environment = {"python": platform.python_version(), "packages": {f"package{i}": "1.2.3" for i in range(12)}}
    size = 0
    with mock.patch("os.fsync"):
        for n in range(runs):
            study, arm, seed = f"study{n // 100:03}", f"arm{n // 10 % 10}", n % 10
            about = {"study": study, "arm": arm, "seed": seed, "key": f"{n:08x}"}
            folder = root / f"{study}-abcd1234" / "runs" / f"{arm}-{seed}"
            record = RunRecord.create(folder, "train", {"model": "nano", "steps": STEPS}, environment, about)
            record.append("attempt", number=1, pid=1, engine="local")
            for step in range(1, STEPS + 1):
                record.append("step", step=step, loss=0.1, reward=0.5, entropy=1.0, seconds=0.5)
            if n % 2:
                record.append("finished", step=STEPS)
            size += (folder / "record.jsonl").stat().st_size
    return size


def listed(root: Path, runs: int) -> float:
    """Seconds of one listing, which must be right."""
    begun = time.perf_counter()
    found = Store(root).summaries()
    seconds = time.perf_counter() - begun
    assert [len(found), sum(s.status == "done" for s in found)] == [runs, runs // 2]
    return seconds


def cold(root: Path, runs: int) -> float:
    """Seconds of a listing that has no index yet, and makes one."""
    (root / FILE).unlink(missing_ok=True)
    return listed(root, runs)


def measure(runs: int) -> tuple[dict[str, list[float]], int, int]:
    """Seconds of every listing by kind, the bytes of the records and of the index."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(store_module, "FRESH", 0.0):
        root = Path(folder)
        size = make(root, runs)
        found = {"cold, makes the index": [cold(root, runs) for _ in range(ROUNDS)]}
        found["warm"] = [listed(root, runs) for _ in range(ROUNDS)]
        found["warm, studies"] = [_studies(root) for _ in range(ROUNDS)]
        index = (root / FILE).stat().st_size
        with mock.patch.object(Index, "_ask", return_value=None):
            found["without an index"] = [listed(root, runs) for _ in range(ROUNDS)]
    return found, size, index


def _studies(root: Path) -> float:
    begun = time.perf_counter()
    Store(root).studies()
    return time.perf_counter() - begun


def table(found: dict[str, list[float]], runs: int, size: int, index: int) -> str:
    """The page."""
    facts = f"date {time.strftime('%Y-%m-%d')}, rounds {ROUNDS}, cores {os.cpu_count()}, machine {platform.machine()}"
    lines = ["# Listing a store", "", f"{facts}, python {platform.python_version()}, files in the page cache", ""]
    lines += [f"{runs:,} runs, half of them finished; records {size / 1e6:.0f} MB, index {index / 1e6:.1f} MB.", ""]
    lines += ["| listing | seconds | range | target |", "|---|---|---|---|"]
    for name, seconds in found.items():
        target = f"≤ {TARGET:g}" if name == "warm" else ""
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} | {target} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    found, size, index = measure(asked.runs)
    page = table(found, asked.runs, size, index)
    print(page)
    if not asked.no_write:
        (HERE / "store.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

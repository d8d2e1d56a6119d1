"""Very many short processes under one plan: each that calls a model has a ledger of its own, and no pass is lost or counted twice.

CI runs 20; `make validate` runs 2,000 (`SHAKETABLE_SHORT_PROCESSES`).
"""

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.attack("thousands of short processes under `run`")
MANY = int(os.environ.get("SHAKETABLE_SHORT_PROCESSES", "20"))
SHARE = 10 if MANY < 1000 else 50
"""One in so many imports torch, which takes a second or two; the others only start and end."""
PROGRAM = """
import subprocess, sys
many, share, at_once = map(int, sys.argv[1:])
CALLS = "import torch; m = torch.nn.Linear(4, 4); [m(torch.ones(1, 4)) for _ in range({n})]"
codes, running = [], []
for n in range(many):
    code = CALLS.format(n=1 + n % 3) if n % share == 0 else "pass"
    running.append(subprocess.Popen([sys.executable, "-c", code]))
    if len(running) >= at_once:
        codes.append(running.pop(0).wait())
codes += [process.wait() for process in running]
print("codes", sorted(set(codes)), len(codes))
"""


def test_every_short_process_is_counted_once(tmp_path):
    plan = [
        "--plan",
        "relative_gaussian:0.05@module.linear",
        "--ledger",
        str(tmp_path / "l"),
        "--json",
        str(tmp_path / "out.json"),
    ]
    command = [sys.executable, "-c", PROGRAM, str(MANY), str(SHARE), "2"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shaketable", "run", *plan, "--", *command], capture_output=True, text=True, timeout=3000
    )
    print(f"{MANY} processes in {time.monotonic() - began:.0f} s")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"codes [0] {MANY}\n"
    callers = range(0, MANY, SHARE)
    ledger = json.loads((tmp_path / "out.json").read_text())
    assert sorted(w["forward"] for w in ledger["workers"]) == sorted(1 + n % 3 for n in callers)
    assert ledger["forward"] == sum(1 + n % 3 for n in callers)
    assert ledger["processes"] == len(callers) == len(list((tmp_path / "l").glob("process-*.json")))
    assert not list((tmp_path / "l").glob("*.draft"))

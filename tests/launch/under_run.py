"""Programs that never heard of Shaketable, run under `shaketable run`."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
LINEAR = "relative_gaussian:0.05@module.linear"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def under_plan(folder: Path, plan: str, *command: str, env: dict[str, str] | None = None) -> tuple[int, dict, str]:
    """Run a program under a plan: exit code, merged ledger, what was printed."""
    words = [sys.executable, "-m", "shaketable", "run", "--plan", plan, "--seed", "3", "--ledger", str(folder), "--", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | (env or {}))
    file = folder / "ledger.json"
    return done.returncode, json.loads(file.read_text()) if file.exists() else {}, done.stdout + done.stderr


def program(name: str, *arguments: str) -> list[str]:
    """The command of a program of this folder."""
    return [sys.executable, str(PROGRAMS / name), *arguments]

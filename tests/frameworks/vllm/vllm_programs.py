"""Programs with vLLM in them, run as a user would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.frameworks.vllm.small_engines import NANO

FOLDER = Path(__file__).with_name("programs")
NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "SHAKETABLE_PLAN", "SHAKETABLE_LEDGER")


def run(*command, **env):
    """Run a program to its end; vLLM starts processes of its own."""
    return subprocess.run([str(c) for c in command], env=environment(**env), capture_output=True, text=True, timeout=300)


def environment(**more):
    """Ours, as if no test had run in this process; a PYTHONPATH goes in front of the one there is, which may hold this checkout."""
    found = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | more
    if "PYTHONPATH" in more and "PYTHONPATH" in os.environ:
        found["PYTHONPATH"] = os.pathsep.join([more["PYTHONPATH"], os.environ["PYTHONPATH"]])
    return found


def offline(*arguments, **env):
    """The program that knows nothing of us."""
    return run(sys.executable, FOLDER / "offline.py", NANO, *arguments, **env)


def shaken(plan, ledger, *command, **env):
    """A program under `shaketable run`."""
    return run(sys.executable, "-m", "shaketable", "run", "--plan", plan, "--ledger", ledger, "--", *command, **env)


def answers(path):
    """What `offline.py` left: token ids and log-probability per prompt."""
    return [(ids, logprob) for ids, logprob in json.loads(path.read_text())]


def printed(result):
    """All that a program wrote."""
    return result.stdout + result.stderr

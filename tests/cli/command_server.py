"""The real command line many times over, for the price of one import: a process that has imported torch and forks.

Every command runs `shaketable.cli.main` in a child of its own, so it can be killed, and its limits and patches die with it.
`first` is Python that the child runs before the command, for instance to kill itself at a chosen moment.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass

SERVER = """
import json, os, signal, sys, traceback
import torch, transformers, trl, peft
import shaketable.cli, shaketable.records.environment, shaketable.train.plans, shaketable.train.run
import shaketable.train.summary, shaketable.aqn.plot, rich.progress, rich.table
from shaketable.evaluate.tasks import load_task
torch.set_num_threads(1)
load_task("arithmetic").problems("test")
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv, code = ["shaketable", *asked["words"]], 1
        try:
            exec(asked["first"], {})
            shaketable.cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}


@dataclass(frozen=True)
class Done:
    """What a command did. A negative code is the signal that killed it."""

    code: int
    stdout: str
    stderr: str


@functools.cache
def _server():
    command = [sys.executable, "-c", SERVER]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
        "env": os.environ | ENVIRONMENT,
    }
    server = subprocess.Popen(command, **pipes)
    atexit.register(server.kill)
    return server


def shaketable(folder, *words, first=""):
    """Run `shaketable WORDS…` in a folder."""
    server = _server()
    places = {name: str(folder / f".{name}") for name in ("stdout", "stderr")}
    asked = {
        "folder": str(folder),
        "words": [str(w) for w in words],
        "first": first,
        "environment": os.environ | ENVIRONMENT,
        **places,
    }
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    done = Done(code, *((folder / f".{name}").read_text() for name in places))
    for name in places:
        (folder / f".{name}").unlink()
    return done

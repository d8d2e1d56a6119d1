"""Programs with vLLM in them, run as a user would run them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.frameworks.vllm.small_engines import NANO

FOLDER = Path(__file__).with_name("programs")
NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "SHAKETABLE_PLAN", "SHAKETABLE_LEDGER")


def run(*command, **env):
    """Run a program to its end; vLLM starts processes of its own."""
    return subprocess.run([str(c) for c in command], env=environment(**env), capture_output=True, text=True, timeout=800)


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


@contextmanager
def serving(folder, *words, before=()):
    """`vllm serve` of the small model with these words, a command before it, in a folder where it leaves its `log`.

    It is told to go at the end; whatever happened, nothing of it is left: it leads a process group of its own.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*before, Path(sys.executable).with_name("vllm"), "serve", NANO, *words, "--host", "127.0.0.1", "--port", port]
    with open(folder / "log", "w") as log:
        program = subprocess.Popen(
            [str(word) for word in command],
            env=environment(),
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_for(program, port, folder / "log")
        yield port
        program.send_signal(signal.SIGTERM)
        program.wait(timeout=800)
    finally:
        _kill_group(program)


def _kill_group(program):
    """End all processes that a program has started and left; its number is theirs until the last of them is gone."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait(timeout=60)


def _wait_for(program, port, log):
    for _ in range(1200):
        assert program.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.25)
    raise AssertionError("the server did not come up")


def complete(port, prompt="12+30="):
    """What a server answers."""
    body = json.dumps({"model": str(NANO), "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def answers(path):
    """What `offline.py` left: token ids and log-probability per prompt."""
    return [(ids, logprob) for ids, logprob in json.loads(path.read_text())]


def printed(result):
    """All that a program wrote."""
    return result.stdout + result.stderr

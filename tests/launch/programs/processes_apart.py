"""A program whose main process has a model, and whose children do something else.

processes_apart.py KIND
"""

import multiprocessing
import signal
import subprocess
import sys
from multiprocessing.synchronize import Event

import torch
from torch import nn


def serve() -> None:
    """Imports torch, has tensors, functions and modules without parameters; calls no model."""
    import torch

    nn.Sequential(nn.ReLU(), nn.Dropout())(torch.ones(4) @ torch.ones(4, 4))


def other_model() -> None:
    nn.Sequential(nn.Conv1d(1, 1, 3))(torch.randn(4, 1, 8))


def evaluate() -> None:
    nn.Sequential(nn.Linear(8, 8)).eval()(torch.randn(4, 8))


def stuck(inside: Event) -> None:
    """Is killed in the middle of its first pass."""

    def say_and_wait(*_: object) -> None:
        inside.set()
        signal.pause()

    model = nn.Sequential(nn.Identity(), nn.Linear(8, 8))
    model[0].register_forward_hook(say_and_wait)
    model(torch.randn(4, 8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    nn.Sequential(nn.Linear(8, 8))(torch.randn(4, 8))
    if sys.argv[1] == "subprocess":
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(3) + 1"], check=True)
    else:
        context = multiprocessing.get_context("spawn")
        inside = context.Event()
        arguments = (inside,) if sys.argv[1] == "stuck" else ()
        child = context.Process(target=globals()[sys.argv[1]], args=arguments)
        child.start()
        if sys.argv[1] == "stuck":
            inside.wait()
            child.kill()
        child.join()

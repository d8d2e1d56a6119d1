"""A program whose main process has a model, and whose children do something else.

processes_apart.py KIND
"""

import multiprocessing
import subprocess
import sys
import time

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


def stuck() -> None:
    """Is killed in the middle of its first pass."""
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: time.sleep(600))
    model(torch.randn(4, 8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    nn.Sequential(nn.Linear(8, 8))(torch.randn(4, 8))
    if sys.argv[1] == "subprocess":
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(3) + 1"], check=True)
    else:
        child = multiprocessing.get_context("spawn").Process(target=globals()[sys.argv[1]])
        child.start()
        if sys.argv[1] == "stuck":
            time.sleep(8)
            child.kill()
        child.join()

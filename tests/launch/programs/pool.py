"""A pool, which ends its children by a signal as soon as the last result is in. No clock writes their ledgers.

pool.py PACKAGE START_METHOD
"""

import importlib
import sys

import shaketable.launch.kept_file

shaketable.launch.kept_file.PAUSE = 3600

import torch  # noqa: E402


def work(x: int) -> int:
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    return x


if __name__ == "__main__":
    multiprocessing = importlib.import_module(sys.argv[1])
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        assert pool.map(work, range(20)) == list(range(20))

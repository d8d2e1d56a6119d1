"""A pool, which ends its children by a signal as soon as the last result is in. No clock writes their ledgers.

pool.py PACKAGE START_METHOD [away]     # away: one child, and the ledger's folder is away for the first half
"""

import importlib
import os
import sys

import shaketable.launch.ledger_file

shaketable.launch.ledger_file.PAUSE = 3600

import torch  # noqa: E402


def work(x: int) -> int:
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    return x


if __name__ == "__main__":
    multiprocessing = importlib.import_module(sys.argv[1])
    ledger, half = os.environ["SHAKETABLE_LEDGER"], list(range(10))
    away = ledger + "-away" if sys.argv[3:] else ledger
    os.rename(ledger, away)
    with multiprocessing.get_context(sys.argv[2]).Pool(1 if sys.argv[3:] else 2) as pool:
        assert pool.map(work, half, chunksize=1) == half
        os.rename(away, ledger)
        assert pool.map(work, half, chunksize=1) == half

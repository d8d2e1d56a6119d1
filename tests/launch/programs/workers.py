"""Forked and spawned workers, and DataLoader workers, each with a model of its own."""

import multiprocessing
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset


def work(n: int) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    for _ in range(n):
        model(torch.ones(2, 4))


class Embedded(Dataset):
    """Computes its items with a model, inside the worker."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.full((4,), float(i + 1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind = sys.argv[1]
    if kind == "loader":
        assert len(list(DataLoader(Embedded(), batch_size=1, num_workers=2))) == 6
    elif kind == "threads":
        threads = [threading.Thread(target=work, args=(3,)) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    else:
        context = multiprocessing.get_context(kind)
        children = [context.Process(target=work, args=(2 + i,)) for i in range(2)]
        [c.start() for c in children]
        [c.join() for c in children]
        work(1)

"""A Ray program: one task and one actor, each with a model."""

import os

import ray


@ray.remote
def task(n: int) -> int:
    import torch

    model = torch.nn.Linear(4, 4)
    for _ in range(n):
        model(torch.ones(2, 4))
    return os.getpid()


@ray.remote
class Actor:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.model = torch.nn.Linear(4, 4)

    def call(self, n: int) -> int:
        for _ in range(n):
            self.model(self.torch.ones(2, 4))
        return os.getpid()


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR")
actor = Actor.remote()
pids = ray.get([task.remote(3), actor.call.remote(4)])
ray.get(actor.call.remote(4))
assert os.getpid() not in pids
ray.shutdown()

"""Workers whose ledger is never written by the clock, killed as soon as they have answered: whatever they answered with.

    answers.py ADDRESS

Prints how many passes were answered for as one line of JSON.
"""

import contextlib
import json
import os
import sys

import ray


def no_clock() -> None:
    """Instead of a machine too busy to let a thread write: it will not write in this hour."""
    import shaketable.launch.ledger_file as kept_file

    kept_file.PAUSE = 3600


def model_pass() -> None:
    import torch

    torch.nn.Linear(2, 2)(torch.ones(1, 2))


@ray.remote
class Worker:
    def __init__(self) -> None:
        model_pass()

    def value(self) -> int:
        model_pass()
        return os.getpid()

    def error(self) -> None:
        model_pass()
        raise ZeroDivisionError

    def stream(self):
        for _ in range(2):
            model_pass()
            yield 1

    def call(self, other: ray.actor.ActorHandle) -> None:
        model_pass()
        other.receive.remote([1])
        os.kill(os.getpid(), 9)

    def receive(self, x: list[int]) -> None: ...


@ray.remote
class Waiting:
    async def value(self) -> int:
        model_pass()
        return os.getpid()


ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", runtime_env={"worker_process_setup_hook": no_clock})
passes = 0
for way in ("value", "error"):
    worker = Worker.remote()
    with contextlib.suppress(ZeroDivisionError):
        ray.get(getattr(worker, way).remote())
    ray.kill(worker)
    passes += 2
worker = Worker.remote()
assert [ray.get(x) for x in worker.stream.options(num_returns="streaming").remote()] == [1, 1]
ray.kill(worker)
passes += 3
waiting = Waiting.remote()
os.kill(ray.get(waiting.value.remote()), 9)
passes += 1
calling, called = Worker.remote(), Worker.remote()
try:
    ray.get(calling.call.remote(called))
except ray.exceptions.RayActorError:
    passes += 3  # two of who called, and the beginning of who was called
ray.get(called.value.remote())
ray.kill(called)
passes += 1
print(json.dumps({"passes": passes}))

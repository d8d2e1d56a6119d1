"""A Ray program that never heard of Shaketable: actors that die, are nested or idle; tasks, one of which is tried again.

    actors_and_tasks.py ADDRESS FOLDER

Prints what everybody saw as one line of JSON, and ends without waiting for anything.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import ray

ADDRESS, FOLDER = sys.argv[1], Path(sys.argv[2])
faulthandler.dump_traceback_later(600)  # should Ray hang: the test ends this program after 800 seconds, and prints what it said


def errors(passes: int) -> list[list[float]]:
    """What is wrong with the output of a small model, pass by pass. The functional form is the truth: it is no module."""
    import torch

    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 16), torch.ones(1, 4)
    truth = torch.nn.functional.linear(x, model.weight, model.bias)
    return [(model(x) - truth)[0].tolist() for _ in range(passes)]


def die_once(name: str, seen: list[list[float]]) -> list[list[float]]:
    """Write down what was seen and die as by kill -9; the second time, return what was written."""
    note = FOLDER / name
    if note.exists():
        return json.loads(note.read_text())
    note.write_text(json.dumps(seen))
    ray.put(seen)  # it has told somebody: from now on its ledger must know
    os.kill(os.getpid(), 9)
    raise AssertionError


@ray.remote
def task(passes: int) -> list[list[float]]:
    return errors(passes)


@ray.remote(max_retries=1)
def fragile_task() -> list[list[list[float]]]:
    seen = errors(2)
    return [die_once("task", seen), seen]


@ray.remote(max_restarts=1, max_task_retries=1)
class Sampler:
    def sample(self, passes: int) -> list[list[float]]:
        return errors(passes)

    def die(self) -> list[list[list[float]]]:
        seen = errors(2)
        return [die_once("actor", seen), seen]

    def nested(self) -> list[list[float]]:
        self.below = Sampler.remote()
        return ray.get(self.below.sample.remote(2))


@ray.remote(runtime_env={"env_vars": {"PYTHONPATH": "/of/the/actor"}})
class OwnPath:
    def sample(self) -> list[object]:
        return [errors(1)[0], "/of/the/actor" in os.environ["PYTHONPATH"], os.environ["MINE"], os.environ["HOOKED"]]


@ray.remote
class Idle:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def rest(self) -> int:
        return 1


def users_own_hook() -> None:
    os.environ["HOOKED"] = "yes"


options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000} if ADDRESS == "local" else {}
mine = {"env_vars": {"MINE": "1"}, "worker_process_setup_hook": users_own_hook}
ray.init(address=ADDRESS, logging_level="ERROR", log_to_driver=False, runtime_env=mine, **options)
seen: dict[str, object] = {"tasks": ray.get([task.remote(2) for _ in range(3)])}
seen["retried"] = ray.get(fragile_task.remote())
first, second = Sampler.remote(), Sampler.options(name="bob").remote()
seen["first"], seen["second"] = ray.get([first.sample.remote(2), second.sample.remote(2)])
seen["lives"] = ray.get(second.die.remote())
seen["nested"] = ray.get(first.nested.remote())
own, idle = OwnPath.remote(), Idle.options(name="resting").remote()
seen["own"], _ = ray.get([own.sample.remote(), idle.rest.remote()])
seen["last"] = ray.get(task.remote(1))
print(json.dumps(seen))

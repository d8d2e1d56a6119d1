"""A Ray program that asks for the plan itself.

own_runtime_env.py ADDRESS LEDGER PLAN tasks|unseen
"""

import json
import os
import sys
from pathlib import Path

import ray

from shaketable.integrations.ray import collect, runtime_env

ADDRESS, LEDGER, PLAN, KIND = sys.argv[1:]


@ray.remote(max_retries=0)
def task(passes: int) -> list[list[float]]:
    import torch

    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 16), torch.ones(1, 4)
    truth = torch.nn.functional.linear(x, model.weight, model.bias)
    return [(model(x) - truth)[0].tolist() for _ in range(passes)]


@ray.remote
class Sampler:
    def sample(self) -> list[object]:
        import torch

        import shaketable

        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        return [shaketable.__file__, os.environ["MINE"]]


options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000} if ADDRESS == "local" else {}
env = runtime_env(PLAN, seed=3, ledger=LEDGER, base={"env_vars": {"MINE": "1"}})
if KIND == "unseen":
    next(Path(LEDGER).glob("*.mark")).unlink()
ray.init(address=ADDRESS, logging_level="ERROR", log_to_driver=False, runtime_env=env, **options)
seen: dict[str, object] = {}
if KIND == "tasks":
    seen["tasks"] = ray.get([task.remote(2) for _ in range(3)])
    for _ in range(200):
        ray.get(task.remote(1))
else:
    try:
        seen["actor"] = ray.get(Sampler.remote().sample.remote())
    except ray.exceptions.RayActorError as error:
        seen["error"] = str(error)
ray.shutdown()
result = collect(LEDGER, allow_inert=KIND == "unseen")
seen["forward"] = result.ledger.forward if result.ledger else 0
seen["places"] = [p.place for p in result.processes]
print(json.dumps(seen))

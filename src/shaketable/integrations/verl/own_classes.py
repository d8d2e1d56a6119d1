"""Our classes in the place of verl's: a trainer on top of the one that a config chooses, and workers."""

from __future__ import annotations

import functools
from typing import Any

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker

from shaketable.errors import ShaketableError
from shaketable.integrations.names import check

check("verl.trainer.ppo.utils:Role")


@functools.cache
def on_top_of(chosen: type, ours: type) -> type:
    """A trainer that is both: a user's own subclass of verl's keeps its ways."""
    if chosen is PPOTrainerSync:
        return ours
    if not issubclass(chosen, PPOTrainerSync):
        raise ShaketableError(f"shaketable works with verl's synchronous trainer, not with {chosen.__name__}")
    return type(f"Shaken{chosen.__name__}", (ours, chosen), {})


def use_worker(classes: dict[Any, Any], ours: type, what: str) -> None:
    """Have a trainer make its actors from our class. `what` needs it, for the line that says why it cannot be done."""
    for role in (Role.ActorRolloutRef, Role.ActorRollout):
        if (chosen := classes.get(role)) is not None:
            if (plain := chosen.__ray_actor_class__) is not ActorRolloutRefWorker:
                raise ShaketableError(f"{what} verl's own worker, not {plain.__name__}")
            classes[role] = ray.remote(ours)

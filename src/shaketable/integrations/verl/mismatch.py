"""Weights of samplers compared with those of actors, every so many steps of a verl training: `+shaketable.mismatch.every=50`.

A check comes after a step's sync, when samplers have the new weights and are awake. What is found goes to verl's loggers under
`shaketable/mismatch/`, and as a line to `mismatch.jsonl` in the run's folder. verl itself logs how far the log-probabilities of
the two sides are apart (`rollout_corr/k3_kl`, `training/rollout_probs_diff_mean`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import compare_digests, digest, named, refuse_stale, weight_counts
from shaketable.integrations.names import check
from shaketable.integrations.verl.settings import ORDERS, Shaking
from shaketable.integrations.verl.trainer import use_worker
from shaketable.integrations.verl.workers import PATIENCE
from shaketable.io.strict_json import strict

check("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync")
OBSERVER = "shaketable.integrations.verl.sampler.ObservedSampler"
"""Our extension of vLLM's workers, whose weights can be compared."""
LINES = "mismatch.jsonl"
WRAPPER = "_checkpoint_wrapped_module."
"""In the names of modules that are recomputed in backward; samplers do not know it."""


class MeasuringTrainer(PPOTrainerSync):  # type: ignore[misc]
    """A synchronous trainer that checks its samplers."""

    def __init__(self, config: DictConfig, shaking: Shaking) -> None:
        assert shaking.mismatch is not None
        self.shaking, self.asked = shaking, shaking.mismatch
        super().__init__(config=config)

    def _init_resource_pool_mgr(self) -> None:
        """verl chooses its worker classes here."""
        super()._init_resource_pool_mgr()
        folder = self.shaking.ledger
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ORDERS).write_text(json.dumps({"mismatch": self.asked.model_dump()}, indent=2) + "\n", encoding="utf-8")
        rollout = self.config.actor_rollout_ref.rollout
        with open_dict(rollout):
            kwargs = OmegaConf.to_container(rollout.engine_kwargs).get("vllm") or {}
            rollout.engine_kwargs["vllm"] = kwargs | {"worker_extension_cls": OBSERVER}
        use_worker(self.role_worker_mapping, MeasuredWorker, "shaketable.mismatch needs")

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """verl asks for metrics when the step is done, and the samplers have its weights and are awake."""
        metrics: dict[str, Any] = super()._consume_sync_metrics()
        if (self.global_steps - 1) % self.asked.every:
            return metrics
        samplers = self._ask_samplers()
        dtype = getattr(torch, samplers[0]["dtype"].removeprefix("torch."))
        answers = self.actor_rollout_wg.weight_digests(dtype)
        own = next(answer for answer in answers if answer is not None)
        weights = compare_digests(own, [held["digests"] for held in samplers], dtype)
        numbers = weight_counts(weights)
        line = {"step": self.global_steps, **numbers, "differing": strict(weights.differing)}
        with (self.shaking.ledger / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.asked.stop:
            refuse_stale(weights, self.global_steps)
        return {**metrics, **named(numbers)}

    def _ask_samplers(self) -> list[dict[str, Any]]:
        """What every sampler holds. verl's calls into samplers return nothing, so each leaves a file."""
        files = [self.shaking.ledger / f"answer-{uuid.uuid4().hex}.json" for _ in self.llm_server_manager.server_handles]
        servers = zip(self.llm_server_manager.server_handles, files, strict=True)
        ray.get([server.collective_rpc.remote("write_digests", args=(str(file),)) for server, file in servers])
        return [_read(file) for file in files]


def _read(file: Path) -> dict[str, Any]:
    """The answer of one sampler; a folder that machines share shows it late."""
    end = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            raise ShaketableError(f"a sampler was asked for its weights and left no answer in {file.parent}")
        time.sleep(0.1)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return found


class MeasuredWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, which can be compared with samplers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def weight_digests(self, dtype: torch.dtype) -> dict[str, tuple[str, str]] | None:
        """The digests of every weight, as it is and in the samplers' dtype.

        Returns:
            None on all ranks but 0, which only help to put weights together.
        """
        found = {}
        for name, value in _whole_weights(self.actor.engine.module):
            if self.rank == 0:
                found[name] = digest(value), digest(value.to(dtype))
        return found if self.rank == 0 else None


def _whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its own name, put together from the parts of all ranks, which must ask in the same order."""
    for name, value in model.named_parameters(remove_duplicate=False):
        here: Any = value.detach().to(get_device_id()) if isinstance(value, DTensor) else value.detach()
        yield name.replace(WRAPPER, ""), here.full_tensor() if isinstance(here, DTensor) else here

"""verl's synchronous trainer, which compares its samplers with its actors every so many steps.

    a step            the samplers' log-probabilities against the actors' own, of every completion: the gap
    after its sync    samplers have the new weights and are awake: weights against weights; floor and share, if there is time

What is found goes to verl's loggers under `shaketable/mismatch/`, and as a line to `mismatch.jsonl` in the run's folder.
"""

from __future__ import annotations

import json
from typing import Any

import transfer_queue  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from shaketable.integrations.common.mismatch import ROLLOUTS, Budget, gap, named, refuse_stale, weight_counts
from shaketable.integrations.names import check
from shaketable.integrations.verl.mismatch.actor import MeasuredWorker
from shaketable.integrations.verl.settings import OBSERVER, ORDERS, Shaking
from shaketable.integrations.verl.trainer import use_worker
from shaketable.mismatch.results import as_json

check("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync")
LINES = "mismatch.jsonl"
FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
Completion = tuple[list[int], list[int]]


class MeasuringTrainer(PPOTrainerSync):  # type: ignore[misc]
    """A synchronous trainer that checks its samplers."""

    def __init__(self, config: DictConfig, shaking: Shaking) -> None:
        assert shaking.mismatch is not None
        self.shaking, self.asked = shaking, shaking.mismatch
        self.budget = Budget()
        self._rollouts: list[Completion] = []
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
            rollout.calculate_log_probs = True
        use_worker(self.role_worker_mapping, MeasuredWorker, "shaketable.mismatch needs")

    def on_train_begin(self) -> None:
        """Start to count the time of the training."""
        super().on_train_begin()
        self.budget = Budget()

    @property
    def _is_due(self) -> bool:
        return bool((self.global_steps - 1) % self.asked.every == 0)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Rollouts and updates, and how far the two sides' log-probabilities were apart."""
        batch = super().step(metrics, timing_raw)
        self._spent_before, self._has_time = self.budget.spent, self.budget.is_left
        if self._is_due:
            with self.budget.spending():
                metrics |= named(self._gap(batch))
        return batch

    def _gap(self, batch: Any) -> dict[str, float]:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
        rows = list(zip(*(data[name].unbind() for name in FIELDS), strict=True))
        whole = [row for row in rows if bool(row[2].bool().all()) and len(row[1])]
        self._rollouts = [(row[0].tolist(), row[1].tolist()) for row in whole[:ROLLOUTS]]
        masks = [row[2].bool() for row in rows]
        sides = [[row[at][mask].tolist() for row, mask in zip(rows, masks, strict=True)] for at in (3, 4)]
        return gap(*sides)

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """verl asks for metrics when the step is done, and the samplers have its weights and are awake."""
        found: dict[str, Any] = super()._consume_sync_metrics()
        if not self._is_due:
            return found
        rollouts = self._rollouts if self._has_time else []
        with self.budget.spending():
            compared = self._compare(rollouts)
        numbers = (
            weight_counts(compared["weights"])
            | compared.get("numbers", {})
            | {"seconds": self.budget.spent - self._spent_before}
        )
        with (self.shaking.ledger / LINES).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": self.global_steps, **numbers, "differing": as_json(compared["weights"].differing)}) + "\n"
            )
        if self.asked.stop:
            refuse_stale(compared["weights"], self.global_steps)
        return {**found, **named(numbers)}

    def _compare(self, rollouts: list[Completion]) -> dict[str, Any]:
        servers, folder = self.llm_server_manager.server_handles, str(self.shaking.ledger)
        answers = self.actor_rollout_wg.compare_with_samplers(servers, folder, rollouts)
        found: dict[str, Any] = next(answer for answer in answers if answer is not None)
        return found

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and say at the end what the checks took."""
        super().fit(agent_loop_manager)
        print(f"shaketable: checks of the samplers took {self.budget.spent:.1f} s; {self.shaking.ledger / LINES}", flush=True)
